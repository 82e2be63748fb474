"""The processes of the fleet benchmark: processes with many rollout workers each, a learner, and a launcher's watcher.

Each worker is the real actor with its weight follower, its heartbeat and its own bus connection. Only the model is
missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.training import training_worker
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.environments.builtin import single_turn
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.os_process import signal_on_parent_death
from asyncrl.policies.health.faults import Finding
from benchmarks.fleet_parts import FleetEngine
from benchmarks.simulated import EvenLength, NoText

STOP_SECONDS: Final = 120.0
_JOINING: Final = 4
"""Number of workers of a process that connect at the same time."""
_ATTEMPTS: Final = 10


class Processes:
    """Spawned processes that end with this one. Each reports to its parent when it is ready."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.started: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}

    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_child, args=(main, there, *arguments), name=name, daemon=True)
        process.start()
        there.close()
        self.started[name], self._pipes[name] = process, here

    def pid(self, name: str) -> int:
        return int(self.started[name].pid)

    def told(self, name: str) -> Any:
        """Wait for a process's ready message and return it. Raises EOFError if the process ended instead."""
        return self._pipes[name].recv()

    def pipe(self, name: str) -> Connection:
        return self._pipes[name]

    def codes(self) -> dict[str, int | None]:
        return {name: process.exitcode for name, process in self.started.items()}

    def join(self, name: str, *, seconds: float) -> int | None:
        self.started[name].join(seconds)
        return self.started[name].exitcode  # type: ignore[no-any-return]

    def close(self) -> None:
        for process in self.started.values():
            if process.is_alive():
                process.kill()
            process.join()


def _child(main: Callable[..., None], parent: Connection, *arguments: Any) -> None:
    signal_on_parent_death(signal.SIGKILL)
    main(parent, *arguments)


def workers(
    parent: Connection, run: RunConfig, token: str, names: Sequence[str], seconds: float, num_tokens: int
) -> None:
    """Run the workers; report to the parent when all of them are connected and started."""
    _log_to(run.run_directory / "logs" / f"{names[0]}.log")
    uvloop.run(_workers(parent, run, token, names, seconds, num_tokens))


async def _workers(
    parent: Connection, run: RunConfig, token: str, names: Sequence[str], seconds: float, num_tokens: int
) -> None:
    joining = asyncio.Semaphore(_JOINING)
    joined = 0

    async def live(name: str) -> None:
        nonlocal joined
        async with joining:
            bus = await _connected(run, token=token)
        try:
            actors = worker(run, bus, name=name, engine=FleetEngine(seconds=seconds, num_tokens=num_tokens))
            joined += 1
            if joined == len(names):
                parent.send("ready")
            await supervise(*actors, stop_seconds=STOP_SECONDS)
        finally:
            await bus.close()

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(live(name), name=name)


async def _connected(run: RunConfig, *, token: str) -> Bus:
    """Connect to the bus. Retries, because a connection may time out on an overloaded machine."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(ConfigError):
            return await registry.connect(run, token=token, role="rollout-worker")
    return await registry.connect(run, token=token, role="rollout-worker")


def worker(run: RunConfig, bus: Any, *, name: str, engine: Any) -> list[Actor]:
    """Return a worker's actors as in cli/rollout_worker.py, but with a simulated engine and without a tokenizer."""
    follower = WeightFollower(
        f"{name}.weights", bus, engine=engine, verify=registry.channel(run, bus=bus).verify, load=run.load
    )
    made = training_worker(
        name,
        bus,
        engine=engine,
        follower=follower,
        rollout=single_turn,
        reward=EvenLength(),
        tokenizer=NoText(),
        seed=run.run.seed,
        max_running=run.rollout.max_running,
        max_attempts=run.rollout.max_attempts,
        keep_seconds=run.bus.ack_seconds / 3,
        partial_rollouts=PartialRollouts(
            bus,
            worker=name,
            seconds=run.rollout.partial_save_seconds,
            max_attempts=run.rollout.max_attempts,
            max_staleness=run.max_staleness,
        ),
    )
    return [made, follower, HeartbeatSender(made)]


def learner(parent: Connection, run: RunConfig, token: str) -> None:
    _log_to(run.run_directory / "logs" / "learner.log")
    uvloop.run(_learner(parent, run, token))


async def _learner(parent: Connection, run: RunConfig, token: str) -> None:
    bus = await registry.connect(run, token=token)
    try:
        made, helpers = await build_learner(run, bus=bus, resume=False)
        parent.send("ready")
        await supervise(made, *helpers, HeartbeatSender(made, *helpers), stop_seconds=STOP_SECONDS)
    finally:
        await bus.close()


def watcher(parent: Connection, run: RunConfig, token: str) -> None:
    """Run the health monitor of `asyncrl run`, once a second; send its findings when the parent asks."""
    _log_to(run.run_directory / "logs" / "watcher.log")
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        uvloop.run(_watch(parent, run, token))


async def _watch(parent: Connection, run: RunConfig, token: str) -> None:
    found: dict[str, int] = {}

    def report(findings: list[Finding]) -> None:
        for finding in findings:
            found[finding.fault] = found.get(finding.fault, 0) + 1

    def answer() -> None:
        parent.recv()
        parent.send(found)

    parent.send("ready")
    looking = HealthMonitor(lambda: registry.connect(run, token=token))
    asyncio.get_running_loop().add_reader(parent.fileno(), answer)
    await looking.run(report)


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=path, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
