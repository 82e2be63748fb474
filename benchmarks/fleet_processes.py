"""The processes of the fleet benchmark: processes with many rollout workers each, a learner, and a launcher's watcher.

Each worker is the real actor with its weight follower, its heartbeat and its own bus connection. Only the model is
missing: an engine and a trainer that take time and compute nothing. An answer takes a time that depends on its seed.
Its tokens appear evenly over that time, and partial rollouts hold those so far. The trainer takes a batch every
``step_seconds``; it alone decides how much work a run does, for every fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.port import StepResult
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.environments.builtin import single_turn
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from asyncrl.os_process import signal_on_parent_death
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.health.faults import Finding
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.port import LoadReport
from benchmarks.simulated import EvenLength, NoText
from tests.harness.tiny.files import FIRST_DIGIT

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
        f"{name}.weights", bus, engine=engine, channel=registry.channel(run, bus=bus), load=run.load
    )
    shared = SharedEngine(engine, follower=follower, max_running=run.rollout.max_running)
    maker = GroupMaker(
        name,
        shared,
        rollout=single_turn,
        reward=EvenLength(),
        tokenizer=NoText(),
        seed=run.run.seed,
    )
    partial_rollouts = PartialRollouts(
        bus,
        worker=name,
        seconds=run.rollout.partial_save_seconds,
        max_attempts=run.rollout.max_attempts,
        max_staleness=run.max_staleness,
    )
    stage = training_stage(bus, maker, partial_rollouts=partial_rollouts, keep_seconds=run.bus.ack_seconds / 3)
    made = RolloutWorker(name, bus, engine=shared, stages=[stage], partial_rollouts=partial_rollouts)
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


# -- the model ---------------------------------------------------------------------------------------------------------

LOGPROB: Final = -1.0
_SEED_BITS: Final = 63  # of generation_session.sample_seed


@dataclass(slots=True)
class Growing:
    """One answer in progress.

    versions  (first token, (incarnation, policy version)), in order
    """

    num_tokens: int
    began: float
    seconds: float
    versions: list[tuple[int, tuple[int, int]]] = field(default_factory=list)

    def __len__(self) -> int:
        share = (time.monotonic() - self.began) / self.seconds
        return max(0, min(self.num_tokens - 1, int(share * self.num_tokens)))

    def so_far(self, begin: int = 0) -> Generation:
        return self.whole().first(len(self)).after(begin)

    def whole(self) -> Generation:
        starts = dict(self.versions)  # of several versions at one token, the last
        return Generation(
            tokens=np.full(self.num_tokens, FIRST_DIGIT, np.int32),
            logprobs=np.full(self.num_tokens, LOGPROB, np.float32),
            version_spans=tuple(VersionSpan(start=s, incarnation=v[0], policy_version=v[1]) for s, v in starts.items()),
            finish_reason="stop",
        )


class FleetEngine:
    """An Engine. Answers take ``seconds`` on average, from 0.5 to 1.5 times that."""

    def __init__(self, *, seconds: float, num_tokens: int) -> None:
        self._seconds, self._num_tokens = seconds, num_tokens
        self._version = (0, 0)
        self._growing: dict[int, Growing] = {}
        self._generated = 0

    async def start(self) -> None:
        pass

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        growing = Growing(
            num_tokens=min(self._num_tokens, sampling.max_new_tokens),
            began=time.monotonic(),
            seconds=self._seconds * (0.5 + seed / 2**_SEED_BITS),
            versions=[(0, self._version)],
        )
        if partial is not None:
            partial.follow(growing)
        self._growing[id(growing)] = growing
        try:
            await asyncio.sleep(growing.seconds)
        finally:
            del self._growing[id(growing)]
        self._generated += growing.num_tokens
        return growing.whole()

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._version = weights.version
        for growing in self._growing.values():
            start = len(growing) + 1 if len(growing) else 0
            if start < growing.num_tokens:  # else it is complete, but not yet returned
                growing.versions.append((start, self._version))
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    @property
    def version(self) -> tuple[int, int]:
        return self._version

    @property
    def weight_updater(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._growing), tokens_generated=self._generated)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    step_seconds: float = 1.0


class FleetBackend(BackendAdapter):
    """learner.backend = "benchmarks.fleet_processes:FleetBackend": a step ends ``step_seconds`` after the last one."""

    options_type = Options

    def __init__(self, model_path: Path, *, options: Options, **_: Any) -> None:
        self._seconds = options.step_seconds
        self._ended = time.monotonic()
        self._weights = torch.zeros(1024)

    def start(self) -> None:
        pass

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        time.sleep(max(0.0, self._ended + self._seconds - time.monotonic()))
        self._ended = time.monotonic()
        self._weights += 1
        return StepResult(metrics={"loss": 0.0})

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[np.full(batch.num_tokens, LOGPROB, np.float32) for batch in share] for share in dp_shards]

    def export(self) -> Snapshot:
        return Snapshot.from_tensors([("weight", self._weights)])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._weights, folder / "weight.pt")

    def restore(self, folder: Path) -> None:
        self._weights = torch.load(folder / "weight.pt", weights_only=True)

    def close(self) -> None:
        pass
