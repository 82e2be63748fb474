"""An unchanged environment of verifiers (0.2) without any training code. verifiers calls ``load_environment``."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

LAMPS = {"Koro": "7", "Mava": "3", "Tilo": "5"}


def load_environment(**arguments: Any) -> vf.Environment:
    rows = [{"question": f"How many lamps has {name} with {n} lamps?", "answer": n} for name, n in LAMPS.items()]
    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, **arguments)


def right(completion: Any, answer: str) -> float:
    return float(answer in str(completion[-1]["content"]))
