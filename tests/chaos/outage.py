"""Measures whether engines idle although prompts are waiting, while the learner is down."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.errors import BusError
from tests.chaos import meter

_LOOK_SECONDS: Final = 0.02


@dataclass(slots=True)
class Outage:
    """Worker-seconds during which prompts were waiting, and the part of that time in which the engine decoded nothing.

    A prompt counts as waiting if more groups are on the topic or in flight than engines decode. Groups being rewarded
    or published, and groups in flight to dead workers, also count as waiting. Idle time is therefore never
    underestimated. ``empty_seconds``: an engine decoded nothing and no prompt was waiting, as the window was full.
    """

    seconds: float = 0.0
    idle_seconds: float = 0.0
    empty_seconds: float = 0.0

    @contextlib.asynccontextmanager
    async def watched(
        self, meters: Path, workers: Sequence[int], *, group_size: int, prompts: Callable[[], Awaitable[int]]
    ) -> AsyncIterator[Outage]:
        """Measure while the context is open, or until the bus is gone.

        workers   ids of processes that have sampled at least one token
        prompts   returns the number of unacked groups
        """
        watch = self._watch(meters, workers, group_size=group_size, prompts=prompts)
        task = asyncio.create_task(watch, name="outage")
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _watch(
        self, meters: Path, workers: Sequence[int], *, group_size: int, prompts: Callable[[], Awaitable[int]]
    ) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            running = [meter.of(meters, pid)[1] for pid in workers]
            try:
                num_prompts = await prompts()
            except BusError:
                return
            now = time.monotonic()
            if num_prompts > sum(math.ceil(count / group_size) for count in running):
                self.seconds += (now - before) * len(running)
                self.idle_seconds += (now - before) * running.count(0)
            else:
                self.empty_seconds += (now - before) * running.count(0)
            before = now
