"""Over-sampling with a deadline: of the samples that were begun, the first to finish form the group.

The cancelled samples are the longest ones, which biases lengths. The group therefore carries their number.
Tests: tests/actors/rollout/test_over_sampling.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RolloutError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSampling:
    """The over-sampling rule of one worker.

    extra     samples begun for each group in addition to the requested ones
    seconds   deadline after which the group is complete with ``at_least`` samples; 0: no deadline
    """

    extra: int = 0
    seconds: float = 0.0
    at_least: int = 0

    @property
    def is_on(self) -> bool:
        return self.extra > 0 or self.seconds > 0

    async def cut(self, samples: Sequence[asyncio.Task[Any]], *, group_size: int) -> None:
        """Cancel unfinished samples once enough are made; return when all are done or cancelled.

        consumes: nothing    waits for: samples, the deadline    woken by: a sample that ends, the clock
        """
        changed, late = asyncio.Event(), asyncio.Event()

        def expire() -> None:
            late.set()
            changed.set()

        timer = asyncio.get_running_loop().call_later(self.seconds, expire) if self.seconds else None
        for sample in samples:
            sample.add_done_callback(lambda _: changed.set())
        try:
            while not all(sample.done() for sample in samples):
                changed.clear()
                if sum(map(is_made, samples)) >= (self.at_least if late.is_set() else group_size):
                    for sample in samples:
                        sample.cancel()  # no effect on finished samples
                    return
                await changed.wait()
        finally:
            if timer is not None:
                timer.cancel()


def is_made(sample: asyncio.Task[Any]) -> bool:
    """Return whether a sample has ended and was neither cut nor failed."""
    if not sample.done() or sample.cancelled() or sample.exception() is not None:
        return False
    return not isinstance(sample.result(), RolloutError)
