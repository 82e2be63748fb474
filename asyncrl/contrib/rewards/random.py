"""reward.kind = "random": 1 or 0 by chance, to test a pipeline. Nothing can be learned from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from asyncrl.config.checks import Range
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    probability: Annotated[float, Range(low=0, high=1)] = 0.5
    """Probability of a reward of 1."""
    seed: int = 0
    """Seed of the rewards. The same answer to the same prompt gets the same reward in every worker."""


class RandomReward:
    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, sample: Sample) -> float:
        digest = hashlib.sha256(str(self._options.seed).encode())
        for tokens in (sample.prompt_tokens, sample.trajectory.tokens):
            digest.update(np.asarray(tokens, np.int32).tobytes() + b"|")
        return float(int.from_bytes(digest.digest()[:8], "big") < self._options.probability * 2**64)
