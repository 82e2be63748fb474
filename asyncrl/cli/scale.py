"""`asyncrl scale RUN --rollout-workers N`: sets the number of rollout workers, and waits for them.

The number is a state on the bus. `asyncrl run` starts or drains its own workers until it matches, and again after
--resume. Workers that joined by themselves do not count. Exit code 0: all are up; 1: not yet, and the missing ones are
printed; 2: there is no room for them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import AsyncIterator

from asyncrl.audit import run_folder
from asyncrl.bus.port import Bus
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.config.checks import MOST_WORKERS
from asyncrl.errors import ConfigError, NoRoom
from asyncrl.logs import in_words
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.roles import QUARANTINED
from asyncrl.messages.topics import ACTORS, FLEET, FLEET_STATUS, PROGRESS

ANSWER_SECONDS = 15.0
"""Time limit for `asyncrl run` to answer. It needs some time after the bus was away."""
LOOK_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Time after --timeout for which the command still waits for a bus that does not answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_existing_run(parser)
    parser.add_argument(
        "--rollout-workers",
        type=int,
        required=True,
        metavar="N",
        help="number of rollout workers that `asyncrl run` should keep up",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="how long to wait for them (default: 600)"
    )


def run(options: argparse.Namespace) -> int:
    run_config = run_folder.run_at(options.where, options.overrides, verb="scale")
    return scale(run_config, options.rollout_workers, token=arguments.bus_token(run_config), seconds=options.timeout)


def scale(run: RunConfig, wanted: int, *, token: str, seconds: float) -> int:
    """Request the size and wait for it, up to ``seconds``. Raises ConfigError, and NoRoom if the size is refused."""
    if not 0 <= wanted <= MOST_WORKERS:
        raise ConfigError(f"--rollout-workers: must be in 0..{MOST_WORKERS}, got {wanted}")
    if not seconds > 0:
        raise ConfigError(f"--timeout: must be > 0 seconds, got {seconds:g}")
    return asyncio.run(_scale(run, wanted, token=token, seconds=seconds))


async def _scale(run: RunConfig, wanted: int, *, token: str, seconds: float) -> int:
    async with run_folder.observing(run, token=token, role="operator") as bus:
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):  # calls to a bus that is away wait forever
                return await _ask(bus, run.run.name, wanted, seconds=seconds)
        except TimeoutError:
            print(f"run {run.run.name}: not yet {wanted} rollout workers; its bus does not answer any more")
            return 1


async def _ask(bus: Bus, name: str, wanted: int, *, seconds: float) -> int:
    progress = (await bus.states(PROGRESS)).get("")
    if progress is not None and progress.finished:
        raise ConfigError(f"run {name} is finished; --resume it with more run.steps, then scale it")
    request, started, missing = uuid.uuid4().hex, time.monotonic(), ""
    await bus.put(FLEET, FleetSize(rollout_workers=wanted, request=request))
    async for status in _answers(bus, request, seconds=seconds):
        if status is not None and status.problem:
            raise NoRoom(status.problem)
        before, missing = missing, await _missing(bus, status)
        if not missing:
            print(f"run {name}: {wanted} rollout workers after {time.monotonic() - started:.1f} s")
            return 0
        if missing != before:
            print(f"run {name}: waiting for {missing}", flush=True)
    waited = in_words(time.monotonic() - started)
    print(f"run {name}: not yet {wanted} rollout workers after {waited}; still waiting for {missing}")
    return 1


async def _answers(bus: Bus, request: str, *, seconds: float) -> AsyncIterator[FleetStatus | None]:
    """Yield the answer of `asyncrl run` to our request every LOOK_SECONDS; None until it has seen the request.

    Ends after ``seconds``. Raises ConfigError after ANSWER_SECONDS without an answer.
    """
    clock = asyncio.get_running_loop().time
    start = clock()
    has_answered = False
    while clock() < start + (seconds if has_answered else min(seconds, ANSWER_SECONDS)):
        status = (await bus.states(FLEET_STATUS)).get("")
        if has_answered and status is not None and status.request != request:
            raise ConfigError("another command has asked for a different size in the meantime")
        has_answered = status is not None and status.request == request
        yield status if has_answered else None
        await asyncio.sleep(LOOK_SECONDS)
    if not has_answered:
        raise ConfigError(
            f"no `asyncrl run` answered in {in_words(clock() - start)}; the size stays on the bus and counts when the "
            "run is resumed"
        )


async def _missing(bus: Bus, status: FleetStatus | None) -> str:
    """Describe what is still missing; empty when all requested workers are up."""
    if status is None:
        return "`asyncrl run` to take notice"
    beats = await bus.states(ACTORS)
    absent = status.rollout_workers - len(status.workers)
    phases = {name: beats[name].phase if name in beats else "" for name in status.workers}
    quarantined = [name for name, phase in phases.items() if phase == QUARANTINED]
    starting = [name for name, phase in phases.items() if phase not in ("running", QUARANTINED)]
    parts = [f"{', '.join(starting)} to start"] if starting else []
    parts += [f"{', '.join(quarantined)} to be fixed (quarantined; `asyncrl doctor` says why)"] if quarantined else []
    parts += [f"{absent} that ended and were not started again"] if absent > 0 else []
    parts += [f"{', '.join(status.draining)} to drain"] if status.draining else []
    return " and ".join(parts)
