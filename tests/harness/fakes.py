"""Fake adapters that are fast and fully controllable, and a complete training loop made of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.group_filters import GroupFilters
from asyncrl.actors.learner.learner import Learner
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleRecorder, SampleWriter
from asyncrl.actors.learner.validator import Validator
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.group_rules import GroupRules
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.supervisor import supervise
from asyncrl.backends.port import StepResult
from asyncrl.bus.port import Bus
from asyncrl.config import EvaluationSection, RunConfig
from asyncrl.config.learner import LearnerSection
from asyncrl.config.run import (
    AlgorithmSection,
    CheckpointSection,
    DataSection,
    Mode,
    ModelSection,
    RolloutSection,
    RunSection,
    WeightsSection,
)
from asyncrl.config.staleness import StalenessSection
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.environments.builtin import single_turn
from asyncrl.errors import EngineDied, EngineError, RewardError, WeightsError
from asyncrl.launch.assembly.build_learner import assemble_learner
from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.filters import GroupFilter
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.metric import Metric
from asyncrl.rewards.port import Reward, Sample
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.port import LoadReport
from tests.harness.rows import Rows


class Engine:
    """Answers every prompt with four tokens derived from its seed. ``gate`` holds answers back while it is clear."""

    def __init__(self) -> None:
        self.version = (0, 0)
        self.weight_updater = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.prompts: list[NDArray[np.int32]] = []
        self.loads: list[int] = []
        self.running_at_load: list[int] = []
        self.failures = 0
        self.dies = False
        self.unreadable: set[int] = set()
        self.closed = False

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
        if self.dies:
            raise EngineDied("the engine is gone")
        if self.failures:
            self.failures -= 1
            raise EngineError("a request failed")
        started = self.version
        self.prompts.append(prompt_tokens)
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        tokens = np.random.default_rng(seed).integers(4, 14, 4).astype(np.int32)
        spans = [VersionSpan(start=0, incarnation=started[0], policy_version=started[1])]
        if self.version != started:
            spans.append(VersionSpan(start=2, incarnation=self.version[0], policy_version=self.version[1]))
        return Generation(
            tokens=tokens,
            logprobs=np.full(4, -1.0, np.float32),
            version_spans=tuple(spans),
            finish_reason="stop",
        )

    async def load(self, weights: WeightVersion) -> LoadReport:
        if weights.policy_version in self.unreadable:
            raise WeightsError(f"version {weights.policy_version} is torn")
        self.running_at_load.append(self.running)
        self.version = weights.version
        self.loads.append(weights.policy_version)
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    async def close(self) -> None:
        self.closed = True


class Backend:
    """Remembers which tokens it trained. Its state is the number of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.trained: list[list[MicroBatch]] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.measures: Callable[[int], dict[str, float]] = lambda step: {}

    def start(self) -> None:
        pass

    def step(
        self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        self.before_step(self.steps)
        self.steps += 1
        self.trained.append(list(shares[0]))
        return StepResult(metrics={"loss": float(self.steps), "grad_norm": 1.0} | self.measures(self.steps))

    def forward(
        self, shares: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[np.zeros(micro_batch.num_tokens, np.float32) for micro_batch in share] for share in shares]

    def export(self) -> Snapshot:
        return Snapshot.from_tensors([("steps", torch.tensor([self.steps]))])

    def save(self, folder: Path) -> None:
        (folder / "steps").write_text(str(self.steps))

    def restore(self, folder: Path) -> None:
        self.steps = int((folder / "steps").read_text())

    def close(self) -> None:
        pass


class Channel:
    """A weight channel that moves no weights."""

    sender = None
    progress = 0
    published_bytes = 0

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        digest = hashlib.sha256(repr(list(snapshot.tensors())).encode()).hexdigest()
        return WeightVersion(
            incarnation=incarnation, policy_version=policy_version, uri="nowhere", sha256=digest, num_bytes=0
        )

    def must_store(self, policy_version: int) -> bool:
        return True

    def retain(self, weights: WeightVersion) -> None:
        pass

    def release(self, weights: WeightVersion) -> None:
        pass

    def verify(self, weights: WeightVersion) -> Path:
        return Path(weights.uri)

    def receiver(self, updater: Any, *, engine: str) -> None:
        return None


class Tokenizer:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in token_ids)


@dataclass(frozen=True)
class Judge:
    """A reward made of a function."""

    function: Callable[[Sequence[Sample]], Sequence[Reward | RewardError]]

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardError]:
        return self.function(samples)

    async def close(self) -> None:
        pass


def token_sum(samples: Sequence[Sample]) -> Sequence[Reward]:
    return [Reward(value=float(sample.trajectory.tokens.sum())) for sample in samples]


@dataclass
class Recorder:
    """A metrics sink that keeps everything."""

    rows: list[dict[str, Metric]] = field(default_factory=list)

    def write(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": float(step)} | dict(metrics))

    def close(self) -> None:
        pass


@dataclass
class Loop:
    """A learner, its prompt source, and hooks to inspect them. staleness: more keys of that section."""

    bus: Bus
    directory: Path
    steps: int = 4
    mode: Mode = "async"
    max_staleness: int = 2
    groups_per_batch: int = 2
    group_size: int = 2
    checkpoint_every: int = 0
    wait_for_stragglers: bool = False
    filters: dict[str, GroupFilter] = field(default_factory=dict)
    rows: Rows = field(default_factory=Rows)
    max_failed_in_a_row: int = 64
    max_filtered_in_a_row: int = 64
    algorithm: Algorithm = resolve(ALGORITHMS["grpo"])
    staleness: dict[str, Any] = field(default_factory=dict)
    max_skipped_steps: int = 0
    publish_every: int = 1
    is_colocated: bool = False
    offload: Literal["both", "learner", "engines"] = "both"
    beside_learner: Literal["sample", "pause"] = "sample"
    function: str = "single_turn"
    """Name of the rollout function; a user's own may take several turns."""
    validator: Validator | None = None
    tickets: Tickets = field(default_factory=Tickets)
    channel: Any = field(default_factory=Channel)
    samples: SampleRecorder | None = None
    answers: AnswerRecorder | None = None
    writers: Sequence[SampleWriter] = ()
    """Writers of ``samples`` and ``answers``."""
    algorithm_section: AlgorithmSection = field(default_factory=AlgorithmSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    evaluation_sets: Sequence[EvaluationSet] = ()
    best: str = ""

    def __post_init__(self) -> None:
        self.backend = Backend()
        self.recorder = Recorder()
        self.said: list[str] = []
        """Messages about checkpoints when the loop was resumed."""

    @property
    def run(self) -> RunConfig:
        """The loop's run file; its model, data and adapters are placeholders."""
        return RunConfig(
            model=ModelSection(path=""),
            data=DataSection(path=""),
            run=RunSection(
                name=self.directory.name,
                directory=str(self.directory.parent),
                steps=self.steps,
                mode=self.mode,
                colocated=self.is_colocated,
                offload=self.offload,
            ),
            rollout=RolloutSection(
                group_size=self.group_size,
                max_new_tokens=4,
                function=self.function,
                beside_learner=self.beside_learner,
            ),
            learner=LearnerSection(
                groups_per_batch=self.groups_per_batch,
                micro_batch_tokens=1024,
                learning_rate=1e-3,
                max_skipped_steps=self.max_skipped_steps,
            ),
            staleness=StalenessSection(
                max_staleness=self.max_staleness,
                eviction="wait" if self.wait_for_stragglers else "drop",
                **{"admission": "full", **self.staleness},  # so that what is outstanding does not depend on timing
            ),
            algorithm=self.algorithm_section,
            weights=WeightsSection(every_steps=self.publish_every),
            checkpoint=CheckpointSection(every_steps=self.checkpoint_every, best=self.best),
            evaluation=self.evaluation,
        )

    def build(self, *, resume: bool = False) -> Learner:
        state, restore_from = self._state(resume)
        validator = self.validator or Validator(self.bus)
        validator.tickets = self.tickets
        validator.filters = GroupFilters(
            self.filters,
            max_in_a_row=self.max_filtered_in_a_row,
            max_raised=self.max_failed_in_a_row,
            cap=self.run.algorithm.filter_cap,
            keeps_at_cap=self.run.algorithm.filter_cap_action == "keep",
        )
        self.learner, self.others = assemble_learner(
            self.run,
            bus=self.bus,
            state=state,
            restore_from=restore_from,
            algorithm=self.algorithm,
            backend=self.backend,
            channel=self.channel,
            rows=self.rows,
            metrics=MetricsReporter(self.bus, [self.recorder], samples=self.writers),
            validator=validator,
            samples=self.samples,
            answers=self.answers,
            evaluation_sets=self.evaluation_sets,
            max_failed_in_a_row=self.max_failed_in_a_row,
        )
        self.table = self.learner.table
        return self.learner

    def _state(self, resume: bool) -> tuple[LearnerState, Path | None]:
        if not resume:
            return LearnerState.fresh(), None
        found = checkpoint.resume(self.directory / "checkpoints", say=self.said.append)
        state, folder = found or (LearnerState.fresh(), None)
        incarnation = state.incarnation + 1
        resume_points = state.resume_points | {incarnation: state.policy_version}
        return dataclasses.replace(state, incarnation=incarnation, resume_points=resume_points), folder

    async def run_learner(self, *, resume: bool = False) -> Learner:
        learner = self.build(resume=resume)
        await supervise(learner, *self.others, HeartbeatSender(learner))
        return learner

    @property
    def trained_groups(self) -> int:
        """Groups of every batch that this backend has trained."""
        sequences = sum(len(m.boundaries) - 1 for step in self.backend.trained for m in step)
        return sequences // self.group_size


def worker(
    bus: Bus, engine: Engine, *, name: str = "w0", load: str = "in_flight", max_staleness: int = 2, **changes: Any
) -> tuple[RolloutWorker, WeightFollower]:
    """``changes``: fields of GroupRules, arguments of SharedEngine and GroupMaker, max_attempts, keep_seconds,
    partial_rollouts."""
    follower = WeightFollower(
        f"{name}.weights", bus, engine=engine, channel=Channel(), load=load, max_staleness=max_staleness
    )

    def pick(names: Iterable[str], **defaults: Any) -> dict[str, Any]:
        return defaults | {key: changes.pop(key) for key in names if key in changes}

    shared = SharedEngine(engine, follower=follower, **pick(("max_running", "context_tokens"), max_running=8))
    rules = GroupRules(**pick([field.name for field in dataclasses.fields(GroupRules)]))
    parts = pick(("rollout", "reward"), rollout=single_turn, reward=Judge(token_sum))
    maker = GroupMaker(name, shared, tokenizer=Tokenizer(), seed=0, rules=rules, **parts)
    max_attempts = changes.pop("max_attempts", 3)
    partial = changes.pop("partial_rollouts", None)
    partial = partial or PartialRollouts(bus, worker=name, seconds=0, max_attempts=max_attempts)
    stage = training_stage(bus, maker, partial_rollouts=partial, **({"keep_seconds": 10.0} | changes))
    return RolloutWorker(name, bus, engine=shared, stages=[stage], partial_rollouts=partial), follower


async def run_worker(actors: tuple[RolloutWorker, WeightFollower]) -> None:
    main, follower = actors
    await supervise(main, follower, HeartbeatSender(main))


async def run_all(loop: Loop, *workers: tuple[RolloutWorker, WeightFollower], resume: bool = False) -> None:
    """Run the learner and the workers to their ends."""
    async with asyncio.TaskGroup() as group:
        for actors in workers:
            group.create_task(run_worker(actors))
        await loop.run_learner(resume=resume)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until ``condition``. Raises TimeoutError after two minutes."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)
