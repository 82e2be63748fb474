"""Run the real loop once with simulated engines and trainer, all actors on one event loop, and report the result."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.learner.learner import Learner
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.validator import Validator
from asyncrl.actors.rollout.evaluation import DatasetRewards, EvaluationWorker, evaluation_stage
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import EvaluationDataset, EvaluationSection, RunConfig
from asyncrl.config.data import DataSection
from asyncrl.config.learner import LearnerSection
from asyncrl.config.run import CheckpointSection, ModelSection, RolloutSection, RunSection
from asyncrl.config.staleness import StalenessSection
from asyncrl.environments.builtin import single_turn
from asyncrl.launch.assembly.build_learner import assemble_learner
from asyncrl.messages import SamplingParams
from asyncrl.planning.simulation import Plan, Timing
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.evaluation.questions import EvaluationSet, Question
from asyncrl.policies.evaluation.results import Measured
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.metric import Histogram, Metric
from benchmarks.simulated import EvenLength, Lengths, NoText, NullChannel, PromptRows, SimulatedEngine, TimedBackend

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """Continuous evaluation of ``num_prompts`` prompts with one answer each. A new one starts when the last one ends.

    engines  number of engines for evaluation only; 0: it shares those of training, at most ``share`` of them
    """

    num_prompts: int
    engines: int = 0
    share: float = 0.25

    @property
    def section(self) -> EvaluationSection:
        return EvaluationSection(
            every_steps=1,
            at_start=False,
            at_end=False,
            place="dedicated" if self.engines else "shared",
            share=self.share,
            datasets=(EvaluationDataset(name="simulated", path=""),),
        )

    @property
    def sets(self) -> list[EvaluationSet]:
        return [
            EvaluationSet(
                name="simulated",
                questions=[Question(prompt="", tokens=np.ones(4, np.int32)) for _ in range(self.num_prompts)],
                sampling=SamplingParams(max_new_tokens=2**20, is_trained=False),
                measured=Measured(num_prompts=self.num_prompts, num_samples=1),
            )
        ]


@dataclass(frozen=True, slots=True)
class Moment:
    """Readings at the report of a step. Two of them delimit the steady window."""

    at: float
    cpu_seconds: float
    server_cpu_seconds: float
    starved_seconds: float
    busy_seconds: tuple[float, ...]
    dropped: float


class Window:
    """A metrics sink that remembers the reports of the steps after the warm-up."""

    def __init__(self, plan: Plan, engines: Sequence[SimulatedEngine], server: EmbeddedServer) -> None:
        self._plan, self._engines, self._server = plan, engines, server
        self.moments: list[Moment] = []
        self.steps: list[Mapping[str, Metric]] = []
        self.evaluations: list[Mapping[str, Metric]] = []

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        if "evaluation/complete" in metrics:
            self.evaluations.append(metrics)
            return
        if step > self._plan.warmup:
            self.steps.append(metrics)
        if step in (self._plan.warmup, self._plan.steps):
            moment = Moment(
                at=time.monotonic(),
                cpu_seconds=time.process_time(),
                server_cpu_seconds=_cpu_seconds(self._server.pid),
                starved_seconds=_starved_seconds(),
                busy_seconds=tuple(engine.busy_seconds for engine in self._engines),
                dropped=_number(metrics["staleness/dropped_groups"]),
            )
            self.moments.append(moment)

    def close(self) -> None:
        pass

    def sum(self, name: str) -> float:
        return sum(_number(metrics[name]) for metrics in self.steps)

    @property
    def dropped_tokens(self) -> float:
        """Tokens of the groups that were dropped as too stale."""
        dropped = [one for one in self.steps if "length/dropped_mean" in one]
        counts = [histogram.counts for one in dropped if isinstance(histogram := one["length/dropped"], Histogram)]
        means = [_number(one["length/dropped_mean"]) for one in dropped]
        return sum(sum(count) * mean for count, mean in zip(counts, means, strict=True))

    def largest(self, name: str) -> float:
        return max(_number(metrics[name]) for metrics in self.steps)


def _number(metric: Metric) -> float:
    assert isinstance(metric, float | int)
    return float(metric)


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process (Linux only)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _starved_seconds() -> float:
    """Return how long the event loop's thread was ready to run but had no processor (Linux only)."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


async def run_arm(plan: Plan, *, timing: Timing, lengths: Lengths, evaluating: Evaluating | None = None) -> Row:
    """Run the loop once and return its result. Ctrl-C cancels it."""
    alone = evaluating.engines if evaluating is not None else 0
    with tempfile.TemporaryDirectory(prefix="asyncrl-pipeline-") as folder:
        server = EmbeddedServer(Path(folder) / "bus")
        await asyncio.to_thread(server.start)
        try:
            async with contextlib.AsyncExitStack() as stack:
                buses = []
                for _ in range(plan.workers + alone + 1):
                    buses.append(await _connect(server, plan))
                    stack.push_async_callback(buses[-1].close)
                engines = [SimulatedEngine(timing, lengths) for _ in range(plan.workers)]
                window = Window(plan, tuple(engines), server)
                backend = TimedBackend(timing, machines=plan.learner_machines)
                learner, others = _learner(
                    plan, buses[0], backend=backend, window=window, folder=Path(folder), evaluating=evaluating
                )
                lives: list[list[Actor]] = [[learner, *others, HeartbeatSender(learner)]]
                engines += [SimulatedEngine(timing, lengths) for _ in range(alone)]
                for number, (bus, engine) in enumerate(zip(buses[1:], engines, strict=True)):
                    lives.append(
                        _worker(
                            plan,
                            bus,
                            engine=engine,
                            name=f"worker-{number}",
                            trains=number < plan.workers,
                            evaluates=number >= plan.workers or (evaluating is not None and not alone),
                        )
                    )
                await live(lives)
        finally:
            await asyncio.to_thread(server.stop)
    return _row(plan, window=window, backend=backend)


async def live(lives: Sequence[Sequence[Actor]]) -> None:
    """Run every process of a real run as one task. They end by themselves when the learner reports that it is done."""
    me = asyncio.current_task()
    assert me is not None
    async with asyncio.TaskGroup() as group:
        for actors in lives:
            group.create_task(supervise(*actors), name=actors[0].name)
        await asyncio.sleep(0)  # each process has set its signal handlers; replace them by common ones
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, me.cancel)


async def _connect(server: EmbeddedServer, plan: Plan) -> JetStreamBus:
    return await JetStreamBus.connect(
        server.url,
        run="pipeline",
        token=server.token,
        max_prompts=(plan.bound + 1) * plan.groups_per_batch,
        max_log_bytes=2**30,
        ack_seconds=120.0,
        storage="file",
    )


def _learner(
    plan: Plan,
    bus: JetStreamBus,
    *,
    backend: TimedBackend,
    window: Window,
    folder: Path,
    evaluating: Evaluating | None,
) -> tuple[Learner, list[Actor]]:
    run = RunConfig(
        model=ModelSection(path=""),
        data=DataSection(path=""),
        run=RunSection(directory=str(folder), name="pipeline", steps=plan.steps, mode=plan.mode),
        rollout=RolloutSection(group_size=plan.group_size, max_new_tokens=2**20),
        learner=LearnerSection(groups_per_batch=plan.groups_per_batch),
        staleness=StalenessSection(
            max_staleness=plan.bound, admission=plan.opens, eviction=plan.eviction, discard=plan.discard
        ),
        checkpoint=CheckpointSection(every_steps=0, keep_log=True),
        evaluation=evaluating.section if evaluating is not None else EvaluationSection(),
    )
    return assemble_learner(
        run,
        bus=bus,
        state=LearnerState.fresh(),
        algorithm=resolve(ALGORITHMS["grpo"]),
        backend=backend,
        channel=NullChannel(),
        rows=PromptRows(),
        metrics=MetricsReporter(bus, [window]),
        validator=Validator(bus),
        admission=plan.admission,
        evaluation_sets=evaluating.sets if evaluating is not None else (),
        max_failed_in_a_row=1,
    )


def _worker(
    plan: Plan, bus: JetStreamBus, *, engine: SimulatedEngine, name: str, trains: bool = True, evaluates: bool = False
) -> list[Actor]:
    load = "in_flight" if plan.mode == "async" else "on_demand"
    follower = WeightFollower(f"{name}.weights", bus, engine=engine, channel=NullChannel(), load=load, follows=trains)
    slots = plan.slots * plan.group_size
    shared = SharedEngine(engine, follower=follower, max_running=slots)
    partial_rollouts = PartialRollouts(bus, worker=name, seconds=0, max_attempts=3, max_staleness=0)

    def maker(reward: Any, **changes: Any) -> GroupMaker:
        return GroupMaker(
            name, shared, rollout=single_turn, reward=reward, tokenizer=NoText(), seed=plan.seed, **changes
        )

    stages = []
    if trains:
        stages.append(training_stage(bus, maker(EvenLength()), partial_rollouts=partial_rollouts, keep_seconds=40.0))
    if evaluates:
        rewards = DatasetRewards({"simulated": EvenLength()})
        stages.append(
            evaluation_stage(
                bus,
                maker(rewards, need=VersionNeed.for_evaluation),
                rewards=rewards,
                tokenizer=NoText(),
                max_attempts=3,
                keep_seconds=40.0,
                is_dedicated=not trains,
            )
        )
    kind = RolloutWorker if trains else EvaluationWorker
    worker = kind(name, bus, engine=shared, stages=stages, partial_rollouts=partial_rollouts)
    return [worker, follower, HeartbeatSender(worker)]


def _row(plan: Plan, *, window: Window, backend: TimedBackend) -> Row:
    first, last = window.moments
    seconds = last.at - first.at
    trained = backend.steps[plan.warmup :]
    tokens = sum(step_tokens for step_tokens, _ in trained)
    waiting = window.sum("learner/wait_seconds") / seconds
    busy = [after - before for before, after in zip(first.busy_seconds, last.busy_seconds, strict=True)]
    staleness = [_number(metrics["staleness/mean"]) for metrics in window.steps]
    return {
        "mode": plan.mode,
        "workers": plan.workers,
        "learner_machines": plan.learner_machines,
        "tokens_per_second": tokens / seconds,
        "learner_idle": waiting,
        "learner_overhead": 1 - waiting - sum(step_seconds for _, step_seconds in trained) / seconds,
        "rollout_idle": max(0.0, 1 - sum(busy) / len(busy) / seconds),
        "max_staleness": plan.bound,
        "staleness_mean": sum(n * mean for (n, _), mean in zip(trained, staleness, strict=True)) / tokens,
        "staleness_max": int(window.largest("staleness/max")),
        "dropped_groups": int(last.dropped - first.dropped),
        "tokens": tokens,
        "dropped_tokens": window.dropped_tokens,
        "old_tokens": window.sum("staleness/old_tokens") if plan.discard == "tokens" else 0.0,
        "length_mean": tokens / (len(trained) * plan.groups_per_batch * plan.group_size),
        "steps": len(trained),
        "step_seconds": seconds / len(trained),
        "cpu_share": (last.cpu_seconds - first.cpu_seconds) / seconds,
        "server_cpu_share": (last.server_cpu_seconds - first.server_cpu_seconds) / seconds,
        "starved_share": (last.starved_seconds - first.starved_seconds) / seconds,
        "seed": plan.seed,
        "evaluations": len(window.evaluations),
        "evaluations_complete": sum(row["evaluation/complete"] == 1 for row in window.evaluations),
        "evaluation_mixed": sum(_number(row["evaluation/mixed"]) for row in window.evaluations),
        "evaluation_tokens": sum(_number(row["evaluation/tokens"]) for row in window.evaluations),
        "evaluation_seconds": sum(_number(row["evaluation/seconds"]) for row in window.evaluations),
        "evaluation_engine_share": max(
            (_number(row["evaluation/engine_share"]) for row in window.evaluations), default=0.0
        ),
    }
