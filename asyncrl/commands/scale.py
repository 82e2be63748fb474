"""`asyncrl scale RUN --rollout-workers N`: tells a run that is up how large its fleet should be, and waits for it.

The size is a state on the bus: `asyncrl run` starts or drains its own rollout workers until there are so many, and has
as many again after --resume. Workers that joined by themselves do not count.

Exit code 0: the fleet has the size; 1: it has not, and what is missing; 2: there is no room for it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

from asyncrl.app import observe
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, NoRoom
from asyncrl.fleet_messages import MOST_WORKERS, FleetSize, FleetStatus
from asyncrl.policies.faults import QUARANTINED, in_words
from asyncrl.protocols import Bus
from asyncrl.topics import ACTORS, FLEET, FLEET_STATUS, PROGRESS

ANSWER_SECONDS = 15.0
"""How long `asyncrl run` may take to take notice; one whose bus was away needs some."""
LOOK_SECONDS = 0.5


def scale(run: RunConfig, *, rollout_workers: int, token: str, seconds: float) -> int:
    """Ask for the size and wait for it, up to ``seconds``. Raises ConfigError, NoRoom when it is refused."""
    if not 0 <= rollout_workers <= MOST_WORKERS:
        raise ConfigError(f"--rollout-workers: must be in 0..{MOST_WORKERS}, got {rollout_workers}")
    if not seconds > 0:
        raise ConfigError(f"--timeout: must be > 0 seconds, got {seconds:g}")
    return asyncio.run(_scale(run, rollout_workers, token=token, seconds=seconds))


async def _scale(run: RunConfig, wanted: int, *, token: str, seconds: float) -> int:
    bus = await observe(run, token=token, role="operator")
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            raise ConfigError(f"run {run.run.name} is finished; --resume it with more run.steps, then scale it")
        return await _ask(bus, run.run.name, wanted, seconds=seconds)
    finally:
        await bus.close()


async def _ask(bus: Bus, name: str, wanted: int, *, seconds: float) -> int:
    request = uuid.uuid4().hex
    started, said = time.monotonic(), ""
    status: FleetStatus | None = None
    await bus.put(FLEET, FleetSize(rollout_workers=wanted, request=request))
    async for status in _answers(bus, request, seconds=seconds):
        if status is not None and status.problem:
            raise NoRoom(status.problem)
        missing = await _missing(bus, status) if status is not None else "`asyncrl run` to take notice"
        if not missing:
            print(f"run {name}: {wanted} rollout workers after {time.monotonic() - started:.1f} s")
            return 0
        if missing != said:
            print(f"run {name}: waiting for {missing}", flush=True)
            said = missing
    waited = in_words(time.monotonic() - started)
    if status is None:
        raise ConfigError(
            f"run {name}: no `asyncrl run` answered in {waited}; the size is kept on the bus and counts "
            "when the run is resumed"
        )
    print(f"run {name}: not yet {wanted} rollout workers after {waited}; still waiting for {said}")
    return 1


async def _answers(bus: Bus, request: str, *, seconds: float) -> AsyncIterator[FleetStatus | None]:
    """What `asyncrl run` says of our request, again and again; None while it has not seen it. Ends in time."""
    clock = asyncio.get_running_loop().time
    start = clock()
    has_answered = False
    while clock() < start + (seconds if has_answered else min(seconds, ANSWER_SECONDS)):
        status = (await bus.states(FLEET_STATUS)).get("")
        if has_answered and status is not None and status.request != request:
            raise ConfigError("somebody else has asked for another size meanwhile")
        has_answered = status is not None and status.request == request
        yield status if has_answered else None
        await asyncio.sleep(LOOK_SECONDS)


async def _missing(bus: Bus, status: FleetStatus) -> str:
    """Who is not yet where it should be, for a person; empty when the fleet is as it should be."""
    beats = await bus.states(ACTORS)
    phases = {name: beats[name].phase if name in beats else "" for name in status.workers}
    quarantined = [name for name, phase in phases.items() if phase == QUARANTINED]
    starting = [name for name, phase in phases.items() if phase not in ("running", QUARANTINED)]
    parts = [f"{', '.join(starting)} to start"] if starting else []
    parts += [f"{', '.join(quarantined)} to be mended (quarantined; `asyncrl doctor` says why)"] if quarantined else []
    absent = status.rollout_workers - len(status.workers)
    parts += [f"{absent} that ended and were not started again"] if absent > 0 else []
    parts += [f"{', '.join(status.draining)} to drain"] if status.draining else []
    return " and ".join(parts)
