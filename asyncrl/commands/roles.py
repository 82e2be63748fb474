"""One process of a run, from the check of its run file to its exit code: the learner, or a rollout worker."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Coroutine
from typing import Any

from asyncrl import elsewhere, only_learner, only_one
from asyncrl.actors.base import Actor, Heart
from asyncrl.actors.supervisor import supervise
from asyncrl.app import connect
from asyncrl.assembly import build_learner, build_worker
from asyncrl.commands.check import check, check_worker
from asyncrl.config import RunConfig
from asyncrl.config.record import worker_table
from asyncrl.errors import INTERRUPTED, HopelessError
from asyncrl.fleet_messages import RunSettings
from asyncrl.processes import exit_within
from asyncrl.topics import SETTINGS

EXIT_SECONDS = 60.0
"""How long a process may take to end after its actors have stopped."""


def run_learner(run: RunConfig, *, resume: bool, token: str) -> int:
    """The learner's process, to the end of the run. Raises ConfigError while another one has this run."""
    check(run)
    with only_learner.in_folder(run.run_directory):
        return _in_event_loop(_learner(run, resume=resume, token=token))


async def _learner(run: RunConfig, *, resume: bool, token: str) -> int:
    bus = await connect(run, token=token)
    try:
        await only_learner.on_bus(bus, run=run.run.name)
        if resume:
            await elsewhere.refuse(run, bus=bus)
        started = time.monotonic()
        learner, helpers = await build_learner(run, bus=bus, resume=resume)
        if resume:
            print(f"goes on from step {learner.step}, policy version {learner.policy_version}", flush=True)
        sections, withheld = worker_table(run)
        await bus.put(SETTINGS, RunSettings(sections=sections, withheld=withheld))
        gc.freeze()
        await _supervised(learner, *helpers, Heart(learner, *helpers))
        seconds = time.monotonic() - started
        was_drained = learner.draining.is_set() and not learner.done
        if not was_drained and learner.step == 0:
            raise HopelessError("the data ended before one batch was full: nothing was trained; see data.path")
        outcome = "stopped" if was_drained else "done"
        print(
            f"{outcome}: {learner.step} steps in {seconds:.0f} s, {learner.counts}; policy version "
            f"{learner.policy_version}, checkpoint in {run.run_directory / 'checkpoints'}"
            + ("" if learner.done or was_drained else f"; the data has ended before step {run.run.steps}")
        )
        code = INTERRUPTED if was_drained else 0
        exit_within(EXIT_SECONDS, code)
        return code
    finally:
        await bus.close()


def run_worker(run: RunConfig, *, name: str, token: str) -> int:
    """A rollout worker's process, until it is drained or the run is finished."""
    check_worker(run)
    return _in_event_loop(_worker(run, name=name, token=token))


async def _worker(run: RunConfig, *, name: str, token: str) -> int:
    bus = await connect(run, token=token, role="rollout-worker")
    try:
        async with only_one.worker(bus, name, run=run.run.name):
            worker, follower = await build_worker(run, bus=bus, name=name)
            gc.freeze()  # a collection through all that was imported would stop every answer for a tenth of a second
            await _supervised(worker, follower, Heart(worker))
        exit_within(EXIT_SECONDS, 0)
        return 0
    finally:
        await bus.close()


async def _supervised(*actors: Actor) -> None:
    try:
        await supervise(*actors)
    except BaseException as error:
        exit_within(EXIT_SECONDS, getattr(error, "exit_code", 1))
        raise


def worker_name() -> str:
    """Unique among the machines and processes of a run, and fit for a subject."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def _in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one; asyncio's own loop elsewhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: int = uvloop.run(main)
    return result
