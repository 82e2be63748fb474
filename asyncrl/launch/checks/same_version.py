"""Ensures that all processes of a run use the same message schema.

A newer learner and an older worker would misread each other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable

from asyncrl.actors.presence import number_of, process_state
from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.messages import SCHEMA, Heartbeat
from asyncrl.messages.topics import ACTORS, WEIGHTS
from asyncrl.policies.health.faults import EVALUATION_WORKER, LEARNER, REWARD_WORKER, WORKER

SECOND_BEAT_SECONDS = 5.0
"""A running process sends another heartbeat within this time."""
MOST_ASKED = 16
"""Maximum number of processes to check; in a large fleet some are enough."""

log = logging.getLogger("asyncrl.launch.checks.same_version")


async def refuse_others(bus: Bus, *, run: str, is_trusted: Callable[[str], bool] = lambda name: True) -> None:
    """Raise ConfigError while a process with another schema is up. The learner calls this before it publishes anything.

    is_trusted  whether no other process can use this name. Other names only cause a warning; otherwise a client that
                claims to be such a process could keep a restarted learner out
    """
    beats = (await bus.states(ACTORS)).values()
    roles = (LEARNER, WORKER, EVALUATION_WORKER, REWARD_WORKER)
    others = [beat for beat in beats if beat.schema != SCHEMA and beat.role in roles]
    for beat in others[:MOST_ASKED]:
        if not is_trusted(beat.actor):
            log.warning(
                "%s %r (process %d on %s) says that it has another version of asyncrl (message schema %d, ours is %d); "
                "end it, or start it again with this one",
                *(beat.role, beat.actor[:100], beat.pid, beat.host[:100], beat.schema, SCHEMA),
            )
    others = [beat for beat in others if is_trusted(beat.actor)]
    if (found := await still_beating(bus, others)) is not None:
        raise ConfigError(
            f"run.name: {found.role} {found.actor!r} of run {run!r} (process {found.pid} on {found.host}) is up with "
            f"another version of asyncrl (message schema {found.schema}, ours is {SCHEMA}); end it first"
        )


async def await_learner(bus: Bus, *, run: str) -> None:
    """Wait while the run's weights come from a learner with another schema.

    A worker calls this before it takes prompts.
    """
    versions = (await bus.states(WEIGHTS)).values()
    if not versions or any(version.schema == SCHEMA for version in versions):
        return
    log.warning(
        "run %s: its learner has another version of asyncrl (message schema %d, ours is %d); waiting until the run is "
        "resumed with this one",
        run,
        max(version.schema for version in versions),
        SCHEMA,
    )
    async with bus.watch(WEIGHTS) as newer:
        async for version in newer:
            if version.schema == SCHEMA:
                return


async def still_beating(bus: Bus, beats: Iterable[Heartbeat]) -> Heartbeat | None:
    """Return a newer heartbeat of one of these actors; None if all of them have ended.

    A killed process leaves its last heartbeat behind. Processes of this machine that no longer exist are not waited
    for.
    """

    async def beats_again(last: Heartbeat) -> Heartbeat | None:
        try:
            async with asyncio.timeout(SECOND_BEAT_SECONDS), bus.watch(ACTORS, key=last.actor) as newer:
                while number_of(beat := await anext(newer)) == number_of(last):
                    pass
                return beat
        except TimeoutError:
            return None

    asked = [beat for beat in beats if not (beat.host == socket.gethostname() and process_state(beat.pid) == "gone")]
    found = await asyncio.gather(*map(beats_again, asked[:MOST_ASKED]))
    return next((beat for beat in found if beat is not None), None)
