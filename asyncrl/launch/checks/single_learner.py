"""Allows one learner per run; two would overwrite each other's weights."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from asyncrl.actors.presence import heartbeat_id
from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import LEARNER, LEARNERS_ACTORS
from asyncrl.messages.topics import ACTORS
from asyncrl.os_process import process_state

SECOND_BEAT_SECONDS: Final = 5.0
"""A running process sends another heartbeat within this time."""


@contextlib.contextmanager
def in_folder(directory: Path) -> Iterator[None]:
    """Hold the lock of the run's folder; the lock ends with its process.

    Raises ConfigError while another process holds it.
    """
    path = directory / "learner.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{directory}: another learner has this run ({path} is locked); end it first") from None
        yield


async def on_bus(bus: Bus, *, run: str) -> None:
    """Raise ConfigError while a learner of this run sends heartbeats on its bus, from any machine and folder.

    A killed learner leaves its last heartbeat behind. This waits for a newer one, unless the process was on this
    machine and no longer exists.
    """
    states = await bus.states(ACTORS)  # any worker may claim the role, but not the name of the learner's actors
    learners = [beat for beat in states.values() if beat.role == LEARNER and beat.actor in LEARNERS_ACTORS]
    if (beat := await _still_beating(bus, learners)) is not None:
        raise ConfigError(
            f"run.name: a run {run!r} is up on this bus, its learner is process {beat.pid} on {beat.host}; choose "
            "another run.name, or end that one first"
        )


async def _still_beating(bus: Bus, beats: Iterable[Heartbeat]) -> Heartbeat | None:
    """Return a newer heartbeat of one of these actors; None if all of them have ended."""

    async def beats_again(last: Heartbeat) -> Heartbeat | None:
        try:
            async with asyncio.timeout(SECOND_BEAT_SECONDS), bus.watch(ACTORS, key=last.actor) as newer:
                while heartbeat_id(beat := await anext(newer)) == heartbeat_id(last):
                    pass
                return beat
        except TimeoutError:
            return None

    asked = [beat for beat in beats if not (beat.host == socket.gethostname() and process_state(beat.pid) == "gone")]
    found = await asyncio.gather(*map(beats_again, asked))
    return next((beat for beat in found if beat is not None), None)
