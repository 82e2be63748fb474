"""The tiny task's reward function, optionally slow.

reward.kind = "tests.harness.tiny.reward:TinyReward"
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float = 0.0
    """Mean time per group, lognormal (sigma 0.5); stands for a sandbox or a judge model."""


class TinyReward:
    """1.0 when every token is right, otherwise 0.0."""

    def __init__(self, options: Options) -> None:
        self._seconds = options.seconds
        self._random = random.Random(0)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if self._seconds:
            await asyncio.sleep(self._seconds * self._random.lognormvariate(-0.125, 0.5))
        return [float(sample.completion == sample.label) for sample in samples]
