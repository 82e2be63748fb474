"""What workers do while there is no learner: whether anybody's engine stands still although prompts wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.errors import BusError
from tests.chaos import meter

_LOOK_SECONDS: Final = 0.02


@dataclass(slots=True)
class Outage:
    """Worker seconds while prompts waited to be taken, and how many of them an engine decoded nothing.

    A prompt waits when more groups are on the topic, or on loan, than engines decode. That counts groups that are being
    rewarded or published, and those on loan to the dead, as waiting: idleness is never less than is said.
    """

    seconds: float = 0.0
    idle_seconds: float = 0.0

    async def watch(
        self, meters: Path, workers: Sequence[int], *, group_size: int, prompts: Callable[[], Awaitable[int]]
    ) -> None:
        """Look until cancelled, or until the bus is gone too.

        workers: ids of processes that have sampled something;  prompts: groups that are not acked
        """
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
            before = now
