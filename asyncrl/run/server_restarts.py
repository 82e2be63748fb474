"""Keeps the server of the run's bus up, if the run has started one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from asyncrl.bus.adapter import BusServer
from asyncrl.errors import AsyncRLError
from asyncrl.run.child_process import RestartPolicy


async def keep_up(server: BusServer, *, restarts: RestartPolicy, say: Callable[[str], None]) -> str:
    """Restart the server on its port and store whenever it ends: every actor waits for it, and nothing is lost.

    waits for: the end of the server's process, which the kernel signals
    Returns only when no restart is left: the reason why the server ended, for a person.
    """
    while True:
        started = time.monotonic()
        await _ended(server.pid)
        reason, has_worked, uptime = f"{server.name} ended", True, time.monotonic() - started
        while (delay := restarts.next_delay(uptime, has_worked=has_worked)) is not None:
            say(f"{reason}; {restarts}")
            await asyncio.sleep(delay)
            try:
                server.start()  # here and not in another thread: the server ends with the thread that started it
                break
            except AsyncRLError as error:
                reason, has_worked, uptime = str(error), False, 0.0
        else:
            return reason


async def _ended(pid: int) -> None:
    """Wait until the process with this id, a child of ours, has ended."""
    if not pid:
        return
    watched, ended = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
