"""Whose turn it is to have the GPUs that a learner and its engines share: the learner's alone, or the engines'.

A lock of the system on a file of the run's folder: the learner's is exclusive, engines have it together. A process that
dies gives it back, however it dies. Tests: tests/actors/test_shared_gpus.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.02
"""Between two looks at a lock that somebody else has: the system tells nobody that it is free but one who blocks, and a
thread that blocks cannot be cancelled."""


class GpuTurn:
    """One process's way to the lock."""

    def __init__(self, path: Path, *, is_shared: bool) -> None:
        """is_shared: with others who say so too, the engines"""
        self._path = path
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file = -1

    @property
    def is_ours(self) -> bool:
        return self._file >= 0

    async def take(self) -> None:
        """Wait for our turn. waits for: the others    woken by: the clock"""
        while True:
            if self._try():
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _try(self) -> bool:
        if self.is_ours:
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

    def give(self) -> None:
        """To whoever waits."""
        if self.is_ours:
            file, self._file = self._file, -1
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too
            os.close(file)
