"""How full a rollout worker is, and how busy its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Room:
    """How many samples a worker has in progress. Counted in samples, not in groups: most of a group is done long
    before its longest answer, and what it leaves free is taken at once."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.on_change: Callable[[], None] = lambda: None
        self._running = 0
        self._changed = asyncio.Event()

    @property
    def has_place(self) -> bool:
        """Fewer samples are in progress than may be; a group then taken may be over by all but one of its own."""
        return self._running < self.max_running

    @property
    def free_places(self) -> int:
        return max(0, self.max_running - self._running)

    def take(self, count: int) -> Places:
        self._running += count
        self.on_change()
        return Places(self, count)

    def leave(self, count: int) -> None:
        self._running -= count
        self._changed.set()
        self.on_change()

    async def only(self, places: Places) -> None:
        """Until no samples are in progress but these."""
        while self._running > places.taken:
            self._changed.clear()
            await self._changed.wait()


class Places:
    """Those of one group."""

    def __init__(self, room: Room, count: int) -> None:
        self._room = room
        self.taken = count

    def leave(self, count: int) -> None:
        self.taken -= count
        self._room.leave(count)


class Activity:
    """How busy an engine was between two readings."""

    def __init__(self) -> None:
        self.tokens = 0
        self._read_tokens = 0
        self._read_at = time.monotonic()
        self._running = 0
        self._busy_since = 0.0
        self._busy = 0.0

    def running(self) -> Activity:
        return self

    def __enter__(self) -> None:
        if self._running == 0:
            self._busy_since = time.monotonic()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self._busy += time.monotonic() - self._busy_since

    def since_last(self) -> tuple[float, float]:
        """(tokens per second, share of time with nothing running) since the last call."""
        now = time.monotonic()
        busy = self._busy
        if self._running:
            busy += now - self._busy_since
            self._busy_since = now
        elapsed = max(now - self._read_at, 1e-9)
        tokens = self.tokens - self._read_tokens
        self._busy, self._read_at, self._read_tokens = 0.0, now, self.tokens
        return tokens / elapsed, min(1.0, max(0.0, 1.0 - busy / elapsed))
