"""Keeps the server of the run's bus up, if the run has started one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from asyncrl.bus.adapter import BusServer
from asyncrl.errors import AsyncRLError
from asyncrl.launch.processes.child_process import RestartPolicy

LOOK_SECONDS: Final = 2.0


async def keep_up(
    server: BusServer,
    *,
    restarts: RestartPolicy,
    say: Callable[[str], None],
    look_seconds: float = LOOK_SECONDS,
) -> str:
    """Restart the server on its port and store whenever it ends. All actors wait for it, and nothing is lost.

    If the server itself reports that it can no longer store, as after a full disk or without file descriptors, this is
    logged immediately, and the server is killed as soon as there is room; otherwise it would refuse for good. If its
    disk was full, the restart is not counted, because someone has made room: a run survives any number of full disks.

    waits for: the end of the server's process, which the kernel signals; the clock

    Returns only if no restart is left: the reason why the server ended, as text.
    """
    while True:
        started = time.monotonic()
        failure, was_full = await _over(server, say=say, look_seconds=look_seconds)
        reason = f"{server.name} stored no more ({failure})" if failure else f"{server.name} ended"
        has_worked, uptime = True, time.monotonic() - started
        if was_full:
            say(f"{reason}; there is room again, so it is restarted")
            try:
                server.start()
                continue
            except AsyncRLError as error:
                reason, has_worked, uptime = str(error), False, 0.0
        while (delay := restarts.next_delay(uptime, has_worked=has_worked)) is not None:
            say(f"{reason}; {restarts}")
            await asyncio.sleep(delay)
            try:
                server.start()  # in this thread: the server ends with the thread that starts it
                break
            except AsyncRLError as error:
                reason, has_worked, uptime = str(error), False, 0.0
        else:
            return reason


async def kill(server: BusServer, pid: int, *, needs_room: bool) -> None:
    """Kill a server that hangs; ``keep_up`` restarts it. Leave it if its disk is too full for a restart."""
    # in a thread, because a failed disk may not respond
    if needs_room and not await asyncio.to_thread(server.has_room):
        return
    if server.pid == pid:
        os.kill(pid, signal.SIGKILL)


async def _over(server: BusServer, *, say: Callable[[str], None], look_seconds: float) -> tuple[str, bool]:
    """Wait until the server's process has ended.

    Return why it was killed here, if it was, and whether its disk was full.
    """
    pid, failure, is_killed, has_room, was_full = server.pid, "", False, True, False
    ended = asyncio.create_task(_ended(pid), name="server-ended")
    try:
        while not (await asyncio.wait((ended,), timeout=look_seconds))[0]:
            if not failure and (failure := await asyncio.to_thread(server.failure)):
                say(f"{server.name} can store no more ({failure}); it is restarted as soon as there is room")
            had_room, has_room = has_room, await asyncio.to_thread(server.has_room)
            if had_room and not has_room:  # the server may have no room to log it
                say(f"{server.name}: the disk of its store is full; make room: all processes wait, and nothing is lost")
            was_full |= not has_room
            if failure and not is_killed and has_room and server.pid == pid:
                is_killed = True
                os.kill(pid, signal.SIGKILL)
    finally:
        ended.cancel()
    return (failure, was_full) if is_killed else ("", False)


async def _ended(pid: int) -> None:
    """Wait until the child process with this id has ended."""
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
