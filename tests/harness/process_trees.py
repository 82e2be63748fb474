"""The processes below a process, and their ends."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Collection

import psutil


def all_gone(pidfds: list[int], *, seconds: float = 30.0) -> bool:
    """Wait until all processes have ended; a pidfd becomes readable then."""
    for fd in pidfds:
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(fd, select.POLLIN)
        if not ended.poll(1000 * seconds):
            return False
        os.close(fd)
    return True


async def end_of(owner: asyncio.subprocess.Process) -> None:
    """Wait until ``owner`` and its pipe have ended; after wait() alone, other processes may still share the pipe."""
    await owner.communicate()


def descendants(pid: int, *, but: Collection[int] = ()) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    return [os.pidfd_open(process.pid) for process in children if process.pid not in but]
