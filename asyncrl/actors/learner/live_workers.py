"""The rollout workers that send heartbeats. Tests: tests/actors/learner/test_batcher.py, tests/actors/test_loop.py."""

from __future__ import annotations

import math
import time
from typing import Final

from asyncrl.bus.port import Bus
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import WORKER
from asyncrl.messages.topics import ACTORS

LARGE_FLEET: Final = 64
"""With more workers, they are looked up at most every LOOK_SECONDS and a row of metrics has only sums, so the learner's
cost per step does not grow with the fleet."""
LOOK_SECONDS: Final = 10.0


class LiveWorkers:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._found: list[Heartbeat] = []
        self._looked = -math.inf

    async def beats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each live worker; of a large fleet, up to LOOK_SECONDS old."""
        if len(self._found) <= LARGE_FLEET or time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._found = [beat for beat in (await self._bus.states(ACTORS)).values() if beat.role == WORKER]
        return self._found

    async def count(self) -> int:
        """Return the number of workers at the last look; look now if none was known then."""
        return len(self._found or await self.beats())
