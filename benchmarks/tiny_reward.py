"""The reward of staleness_task.py's answers, by a judge who may take time.

reward.kind = "benchmarks.tiny_reward:TinyReward"
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.protocols import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float = 0.0
    """Mean time of a group, lognormal (sigma 0.5): a sandbox, or another model."""


class TinyReward:
    """1 when every token is right."""

    def __init__(self, options: Options) -> None:
        self._seconds = options.seconds
        self._random = random.Random(0)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if self._seconds:
            await asyncio.sleep(self._seconds * self._random.lognormvariate(-0.125, 0.5))
        return [float(sample.completion == sample.label) for sample in samples]
