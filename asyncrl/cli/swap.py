"""`asyncrl swap RUN --set learner.tensor_parallel=2`: another learner takes over a running run; its engines go on.

The new learner starts beside the present one and gets ready. Then the present one ends its step, writes a checkpoint
and leaves, and the new one goes on from there, at the next step, with the same workers. Without --set it is the same
learner as a new process, for example with newer code. Exit code 0: it has taken over; 1: it has not, and why.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from asyncrl.adapters.bus_file import may_be_up
from asyncrl.adapters.registry import observe
from asyncrl.audit import run_folder
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import resume_checks, run_file
from asyncrl.launch.processes.swap import SwapRequest
from asyncrl.logs import in_words
from asyncrl.messages.topics import PROGRESS

CHANGEABLE: Final = (
    *("learner.", "algorithm.", "critic.", "reference.", "teacher.", "checkpoint.", "metrics."),
    *("staleness.weight", "staleness.learning_rate", "staleness.order", "run.steps"),
)
"""Allowed prefixes for --set: what the learner alone reads. Workers keep the settings that they were started with."""
ANSWER_SECONDS: Final = 15.0
LOOK_SECONDS: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN_DIR", type=Path, help="the folder of a run that is up")
    arguments.add_overrides(parser, "setting of the new learner, such as learner.tensor_parallel=2; repeatable")
    add_timeout(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, default=1200.0, metavar="SECONDS", help="how long to wait for it (default: 1200)"
    )


def run(options: argparse.Namespace) -> int:
    return swap(options.where, options.overrides, seconds=options.timeout)


def swap(directory: Path, overrides: Sequence[str], *, seconds: float, shadow: Path | None = None) -> int:
    """Let a learner with these overrides take over the run in ``directory``, and return the exit code.

    shadow  folder of the shadow learner whose state it takes

    Raises ConfigError for a learner that could not go on with the run, and if the run is not up.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no run folder; `asyncrl run` looks there for requests")
    for item in overrides:
        if not item.startswith(CHANGEABLE) or item.startswith("learner.groups_per_batch"):
            raise ConfigError(f"--set {item}: a swap changes what only the learner reads: {', '.join(CHANGEABLE)}...")
    present = run_folder.run_at(directory, [], verb="swap")
    changed = RecordedRun(directory).newest_settings(overrides)
    run_file.check(changed)
    resume_checks.check_settings(changed)
    write = functools.partial(SwapRequest.make, directory, overrides, shadow=shadow)
    return asyncio.run(_swap(write, directory, present, token=arguments.bus_token(present), seconds=seconds))


async def _swap(
    write: Callable[[], SwapRequest], directory: Path, run: RunConfig, *, token: str, seconds: float
) -> int:
    began = time.monotonic()
    bus = await observe(run, token=token)
    request = None
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is None or progress.finished:
            raise ConfigError(f"run {run.run.name} has no learner now; --resume it with these settings instead")
        request = write()
        async with asyncio.timeout(seconds):
            if problem := await _follow(request, directory, run):
                print(f"run {run.run.name}: not swapped: {problem}")
                return 1
            first = asyncio.ensure_future(_first_step(bus, after=progress.incarnation))
            try:
                while not first.done():
                    _require_up(directory, run)
                    await asyncio.wait({first}, timeout=LOOK_SECONDS)
                step = first.result()
            finally:
                first.cancel()
        passed = in_words(time.monotonic() - began)
        print(f"run {run.run.name}: the new learner has taken over, and goes on from step {step}; {passed} in all")
        return 0
    except TimeoutError:
        print(f"run {run.run.name}: not swapped within {seconds:g} s; `asyncrl doctor` says how it is")
        return 1
    finally:
        if request is not None:
            request.remove()
        await bus.close()


def _require_up(directory: Path, run: RunConfig) -> None:
    if not run.bus.url and not may_be_up(directory):
        raise ConfigError(f"run {run.run.name}: `asyncrl run` has ended meanwhile; --resume it with these settings")


async def _follow(request: SwapRequest, directory: Path, run: RunConfig) -> str:
    """Print each phase until the present learner has left, and return ""; or why it does not. Raises ConfigError."""
    began, said, name = time.monotonic(), "", run.run.name
    while (status := request.status) is None or status.phase != "failed":
        if status is None and time.monotonic() - began > ANSWER_SECONDS:
            raise ConfigError(f"run {name}: no `asyncrl run` of this folder has answered in {ANSWER_SECONDS:g} s")
        if status is not None and status.phase != said:
            said = status.phase
            print(f"run {name}: {_MEANING[said]}", flush=True)
        if said == "done":
            return ""
        _require_up(directory, run)
        await asyncio.sleep(LOOK_SECONDS)
    return status.problem


_MEANING: Final = {
    "starting": "the new learner starts; the present one trains",
    "draining": "the new learner is ready; the present one ends its step and writes a checkpoint",
    "done": "the present learner has left; the new one reads the checkpoint",
}


async def _first_step(bus: Bus, *, after: int) -> int:
    """Wait for an incarnation after ``after`` to begin, and return the step it goes on from."""
    async with bus.watch(PROGRESS) as states:
        async for progress in states:
            if progress.incarnation > after:
                return progress.step
    raise TimeoutError
