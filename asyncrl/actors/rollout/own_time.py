"""Measures and limits the time that a rollout function itself takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator


class OwnTime:
    """A clock for one sample that pauses while its rollout function waits for one of our answers.

    Time in tools, environments and judges counts; a busy engine or a load of weights does not.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: time limit; 0 for none"""
        self._seconds = seconds
        self._timeout: asyncio.Timeout | None = None
        self._left = seconds
        self._pauses = 0
        self._is_over = False

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Run the clock while open. Raises TimeoutError once it exceeds the limit."""
        if not self._seconds:
            yield
            return
        try:
            async with asyncio.timeout(self._seconds) as self._timeout:
                yield
        finally:
            self._is_over = self._timeout is not None and self._timeout.expired()
            self._timeout = None  # a call left running by its function is not timed

    @property
    def is_over(self) -> bool:
        """Whether this limit ended the sample."""
        return self._is_over

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock while open; calls may overlap."""
        timeout, loop = self._timeout, asyncio.get_running_loop()
        if timeout is None:
            yield
            return
        self._pauses += 1
        if (end := timeout.when()) is not None:
            self._left = max(0.0, end - loop.time())
            timeout.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and timeout is self._timeout and not timeout.expired():
                timeout.reschedule(loop.time() + self._left)
