"""The lock on the GPUs that a learner and its engines share: either the learner has them, or the engines.

An engine that shares them at the same time takes it only to start, as the learner does: SGLang measures how much memory
is free, and nobody else may take some meanwhile. An engine that pauses for the learner's steps looks at a second such
lock, which the learner holds during each.

It is an flock on a file in the run's folder. The learner takes it exclusively; engines share it. The system releases it
when its process dies, for whatever reason. Tests: tests/actors/test_shared_gpus.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.02
"""Between two attempts at a lock that is taken: the system wakes only a blocked thread, and a blocked thread cannot be
cancelled."""


class GpuTurn:
    """One process's access to the lock."""

    def __init__(self, path: Path, *, is_shared: bool) -> None:
        """is_shared: hold the lock together with other shared holders (the engines)"""
        self._path = path
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file = -1

    @property
    def is_held(self) -> bool:
        return self._file >= 0

    def is_free(self) -> bool:
        """Return whether nobody else holds the lock in a way that excludes us."""
        if self._try():
            self.release()
            return True
        return False

    async def acquire(self) -> None:
        """Wait for our turn. waits for: the other holders    woken by: the clock"""
        while True:
            if self._try():
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _try(self) -> bool:
        if self.is_held:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock."""
        if self.is_held:
            file, self._file = self._file, -1
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked in between also has the file open
            os.close(file)


@contextlib.asynccontextmanager
async def held(turn: GpuTurn | None) -> AsyncIterator[None]:
    """Hold the lock while the block is open; does nothing without one."""
    if turn is None:
        yield
        return
    await turn.acquire()
    try:
        yield
    finally:
        turn.release()
