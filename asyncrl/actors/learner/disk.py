"""Files that cannot be written now: disk full, read-only, I/O error. The learner waits for the disk and continues.

A restart would find the same disk, so the write is retried until it works. The wait is logged at once and every minute,
and shown by `asyncrl doctor` (part "room" of policies/health/waits.py). Unwritten data is never given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.errors import disk_problem
from asyncrl.policies.health.waits import ROOM

T = TypeVar("T")

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 10.0
"""Delays between attempts: nothing announces free space, and a failing attempt may write many bytes first."""

log = logging.getLogger("asyncrl.learner")


class Disk:
    """waits: the learner's wait tracker, which reports the wait for the disk"""

    def __init__(self, waits: WaitTracker) -> None:
        self._waits = waits

    async def write(self, attempt: Callable[[], Awaitable[T]], *, what: str) -> T:
        """Return the result of ``attempt``, retried until the disk accepts it. ``attempt`` must be repeatable.

        waits for: room    woken by: the clock
        """
        try:
            return await attempt()
        except Exception as error:
            if (problem := disk_problem(error)) is None:
                raise
            text = _in_words(what, error)
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        log.error("%s", text)
        with self._waits.waiting(f"room for {what}", on=ROOM, note=f"({problem.strerror})"):
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                try:
                    result = await attempt()
                    break
                except Exception as error:
                    if disk_problem(error) is None:
                        raise
        log.warning("%s was written after %.0f s; the run goes on", what, time.monotonic() - began)
        return result


def _in_words(what: str, error: Exception) -> str:
    text = f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return f"{what} cannot be written: {text}. The run waits for the disk and goes on by itself"
