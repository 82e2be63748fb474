"""The requests to a server: those that it has, and those that are held back while it loads weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """``is_open`` is cleared while no request may be sent."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.max_running = 2**31
        """Requests that the server decodes at once; others wait in it."""
        self._held = self._sent = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until requests may be sent, then count one as sent."""
        self._held += 1
        try:
            await self.is_open.wait()
        finally:
            self._held -= 1
        self._sent += 1
        try:
            yield
        finally:
            self._sent -= 1

    @property
    def running(self) -> int:
        return min(self._sent, self.max_running)

    @property
    def queued(self) -> int:
        return self._held + self._sent - self.running
