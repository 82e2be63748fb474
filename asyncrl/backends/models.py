"""The models a learner holds beside the policy: a trained critic, a frozen reference or teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.policies.objective import Objective

POLICY: Final = "policy"

Head = Literal["logprobs", "values"]
"""logprobs: the output layer over the vocabulary. values: one number per token instead, H -> 1, from 0 at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """A model by its Hugging Face folder. Without ``objective`` and ``optimizer`` it is frozen.

    Of a folder with an output layer a "values" model takes everything but that.
    """

    path: Path
    head: Head = "logprobs"
    objective: Objective | None = None
    optimizer: OptimizerSettings | None = None
