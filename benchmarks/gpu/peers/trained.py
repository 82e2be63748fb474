"""What AReaL's learner was about to train, counted by staleness in its own process: see EDITS in bring_up.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

OUT_VARIABLE: Final = "PEER_OUT"
FILE: Final = "trained.jsonl"


def keep(versions: torch.Tensor, *, trained_version: int) -> None:
    """A line {time, version, counts}; counts[i] tokens are i versions old. Prompts have version -1."""
    counts = (trained_version - versions[versions >= 0].long()).clamp(min=0).bincount().tolist()
    row = {"time": time.time(), "version": trained_version, "counts": counts}
    with (Path(os.environ[OUT_VARIABLE]) / FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")
