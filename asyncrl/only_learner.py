"""One learner a run: two would publish over each other's weights."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

from asyncrl.actors.watcher import process_state
from asyncrl.errors import ConfigError
from asyncrl.messages import Heartbeat
from asyncrl.policies.faults import LEARNER
from asyncrl.protocols import Bus
from asyncrl.topics import ACTORS

SECOND_BEAT_SECONDS = 5.0
"""Who lives has beaten again by then."""


@contextlib.contextmanager
def in_folder(directory: Path) -> Iterator[None]:
    """Raises ConfigError while another process has it; the lock goes with the process, however it ends."""
    path = directory / "learner.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{directory}: another learner has this run ({path} is locked); end it first") from None
        yield


async def on_bus(bus: Bus, *, run: str) -> None:
    """Raises ConfigError while a learner beats for this run on its bus, from whatever machine and folder.

    One that was killed leaves a last beat behind. It is waited for unless its process was of this machine and is gone.
    """
    last = next((beat for beat in (await bus.states(ACTORS)).values() if beat.role == LEARNER), None)
    if last is None or (last.host == socket.gethostname() and process_state(last.pid) == "gone"):
        return
    try:
        async with asyncio.timeout(SECOND_BEAT_SECONDS), bus.watch(ACTORS, key=last.actor) as beats:
            while _life(beat := await anext(beats)) == _life(last):
                pass
    except TimeoutError:
        return
    raise ConfigError(
        f"run.name: a run {run!r} is up on this bus, its learner is process {beat.pid} on {beat.host}; choose another "
        "run.name, or end that one first"
    )


def _life(beat: Heartbeat) -> tuple[str, int, int]:
    return (beat.host, beat.pid, beat.beat)
