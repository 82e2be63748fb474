"""Files that cannot be written now: no room, read-only, an I/O error. The learner waits for the disk and goes on.

A restart would find the same disk. So the write is tried again until it works: said at once and every minute, shown by
`asyncrl doctor` (part "room" of policies/health/faults.py), and nothing is given up that has not been written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.errors import disk_problem
from asyncrl.policies.health.faults import ROOM

T = TypeVar("T")

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 10.0
"""Between two tries: nobody announces that there is room again, and a try may write many bytes in vain."""
SAY_AGAIN_SECONDS: Final = 60.0

log = logging.getLogger("asyncrl.learner")


class Disk:
    """waits: of the learner, which says what it waits for"""

    def __init__(self, waits: WaitTracker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._waits = waits
        self._clock = clock

    async def written(self, write: Callable[[], Awaitable[T]], *, what: str) -> T:
        """What ``write`` returns, tried until the disk takes it. It may be called again after it has failed.

        waits for: room    woken by: the clock
        """
        try:
            return await write()
        except Exception as error:
            if (problem := disk_problem(error)) is None:
                raise
            text = _in_words(what, error)
        began = said = self._clock()
        pause = FIRST_PAUSE_SECONDS
        log.error("%s", text)
        with self._waits.waiting(f"room for {what}", on=ROOM, note=f"({problem.strerror})"):
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                try:
                    result = await write()
                except Exception as error:
                    if disk_problem(error) is None:
                        raise
                    text = _in_words(what, error)
                else:
                    break
                if self._clock() - said >= SAY_AGAIN_SECONDS:
                    said = self._clock()
                    log.error("%s (for %.0f s now)", text, said - began)
        log.warning("%s was written after %.0f s; the run goes on", what, self._clock() - began)
        return result


def _in_words(what: str, error: Exception) -> str:
    text = f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return f"{what} cannot be written: {text}. The run waits for the disk and goes on by itself"
