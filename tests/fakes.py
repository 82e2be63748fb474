"""Adapters that do nothing slowly and everything on purpose, and a whole loop made of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.actors.base import Heart
from asyncrl.actors.batch_feed import BatchFeed, BatchSettings
from asyncrl.actors.examiner import Examiner
from asyncrl.actors.group_filters import GroupFilters
from asyncrl.actors.learner import Learner, LearnerSettings
from asyncrl.actors.prompt_source import PromptSource
from asyncrl.actors.reporter import Reporter
from asyncrl.actors.rollout_worker import RolloutWorker
from asyncrl.actors.rollouts import single_turn
from asyncrl.actors.supervisor import supervise
from asyncrl.actors.training_step import TrainingStep
from asyncrl.actors.weight_follower import WeightFollower
from asyncrl.checkpoint import LearnerState, PromptState, latest
from asyncrl.errors import EngineDied, EngineError, WeightsError
from asyncrl.history import HISTORY_FILE, History
from asyncrl.messages import Sampling, VersionSpan, WeightVersion
from asyncrl.policies.adaptive import AdaptiveBound
from asyncrl.policies.admission import Admission
from asyncrl.policies.algorithms import Algorithm, resolve
from asyncrl.policies.batch import Metric
from asyncrl.policies.buffer import Buffer
from asyncrl.policies.filters import GroupFilter
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.packing import MicroBatch
from asyncrl.policies.rows import ALGORITHMS
from asyncrl.policies.staleness import AgeWeight
from asyncrl.protocols import Bus, EngineStats, Generation, LoadReport, Partial, Reward, Sample, StepResult
from asyncrl.snapshot import Snapshot


class Engine:
    """Answers every prompt with four tokens that its seed decides; ``gate`` holds answers back while it is clear."""

    def __init__(self) -> None:
        self.version = (0, 0)
        self.receiver = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.loads: list[int] = []
        self.running_at_load: list[int] = []
        self.failures = 0
        self.dies = False
        self.unreadable: set[int] = set()
        self.closed = False

    async def start(self) -> None:
        pass

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        if self.dies:
            raise EngineDied("the engine is gone")
        if self.failures:
            self.failures -= 1
            raise EngineError("a request failed")
        started = self.version
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        tokens = np.random.default_rng(seed).integers(4, 14, 4).astype(np.int32)
        spans = [VersionSpan(start=0, run_epoch=started[0], policy_version=started[1])]
        if self.version != started:
            spans.append(VersionSpan(start=2, run_epoch=self.version[0], policy_version=self.version[1]))
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
        self.version = weights.order
        self.loads.append(weights.policy_version)
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    async def close(self) -> None:
        self.closed = True


class Backend:
    """Remembers which tokens it trained; its state is the number of steps."""

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

    def score(
        self, shares: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[np.zeros(micro_batch.num_tokens, np.float32) for micro_batch in share] for share in shares]

    def export(self) -> Snapshot:
        return Snapshot.of([("steps", torch.tensor([self.steps]))])

    def save(self, folder: Path) -> None:
        (folder / "steps").write_text(str(self.steps))

    def restore(self, folder: Path) -> None:
        self.steps = int((folder / "steps").read_text())

    def close(self) -> None:
        pass


class Channel:
    """Weights that are nowhere."""

    sender = None
    progress = 0
    published_bytes = 0

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        digest = hashlib.sha256(repr(list(snapshot.tensors())).encode()).hexdigest()
        return WeightVersion(
            run_epoch=run_epoch, policy_version=policy_version, uri="nowhere", sha256=digest, num_bytes=0
        )

    def verify(self, weights: WeightVersion) -> Path:
        return Path(weights.uri)


class Tokenizer:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in token_ids)


@dataclass(frozen=True)
class Row:
    tokens: NDArray[np.int32]
    prompt: str
    label: Any
    metadata: dict[str, Any]
    epoch: int
    response: NDArray[np.int32]


class Rows:
    """``count`` prompts, for ever or once; ``overlong`` positions are over the limit."""

    def __init__(self, count: int = 5, *, epochs: int = 0, overlong: frozenset[int] = frozenset()) -> None:
        self._count, self._epochs, self._overlong = count, epochs, overlong

    def at(self, position: int) -> Row | None:
        epoch, index = divmod(position, self._count)
        if self._epochs and epoch >= self._epochs:
            return None
        tokens = np.zeros(0, np.int32) if position in self._overlong else np.array([1, 4 + index], np.int32)
        response = np.array([4 + index, 5, 3], np.int32)
        return Row(tokens=tokens, prompt=f"p{index}", label=index, metadata={}, epoch=epoch, response=response)


@dataclass(frozen=True)
class Judge:
    """A reward made of a function."""

    function: Callable[[Sequence[Sample]], Sequence[Reward]]

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
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
    """A learner, its prompt source, and what is needed to look into them."""

    bus: Bus
    directory: Path
    steps: int = 4
    mode: str = "async"
    max_staleness: int = 2
    groups_per_batch: int = 2
    group_size: int = 2
    checkpoint_every: int = 0
    wait_for_stragglers: bool = False
    are_stragglers_cut: bool = False
    filters: dict[str, GroupFilter] = field(default_factory=dict)
    rows: Rows = field(default_factory=Rows)
    max_buried_in_a_row: int = 64
    max_filtered_in_a_row: int = 64
    algorithm: Algorithm = resolve(ALGORITHMS["grpo"])
    bound: AdaptiveBound | None = None
    order: str = "oldest_first"
    age_weight: AgeWeight | None = None
    max_skipped_steps: int = 0
    publish_every: int = 1
    examiner: Examiner | None = None

    def __post_init__(self) -> None:
        self.backend = Backend()
        self.recorder = Recorder()

    def build(self, *, resume: bool = False) -> Learner:
        state, restore_from = self._state(resume)
        self.buffer = Buffer(
            max_staleness=self.max_staleness,
            order=self.order,
            forks=state.forks,
            groups=Ledger.from_json(state.groups),
            consumed=Ledger.from_json(state.consumed),
        )
        self.prompts = PromptSource(
            "prompts",
            self.bus,
            rows=self.rows,
            admission=Admission(
                mode=self.mode,
                groups_per_batch=self.groups_per_batch,
                max_staleness=self.max_staleness,
                total_groups=self.steps * self.groups_per_batch,
            ),
            sampling=Sampling(max_new_tokens=4),
            group_size=self.group_size,
            state=state.prompts,
            groups=self.buffer.groups,
            policy_version=state.policy_version,
            run_epoch=state.run_epoch,
            forks=state.forks,
        )
        feed = BatchFeed(
            BatchSettings(
                groups_per_batch=self.groups_per_batch,
                max_staleness=self.max_staleness,
                wait_for_stragglers=self.wait_for_stragglers,
                are_stragglers_cut=self.are_stragglers_cut,
                shares=1,
                micro_batch_tokens=1024,
                age_weight=self.age_weight,
            ),
            buffer=self.buffer,
            prompts=self.prompts,
            algorithm=self.algorithm,
            bound=self.bound and self.bound.resumed(state.bound),
        )
        self.learner = Learner(
            "learner",
            self.bus,
            settings=LearnerSettings(
                steps=self.steps,
                mode=self.mode,
                learning_rate=1e-3,
                warmup_steps=0,
                checkpoint_directory=self.directory / "checkpoints",
                checkpoint_every=self.checkpoint_every,
                checkpoint_keep=2,
                keep_log=False,
                max_buried_in_a_row=self.max_buried_in_a_row,
                max_skipped_steps=self.max_skipped_steps,
                publish_every=self.publish_every,
            ),
            state=state,
            restore_from=restore_from,
            buffer=self.buffer,
            prompts=self.prompts,
            feed=feed,
            backend=self.backend,
            training=TrainingStep(self.backend, algorithm=self.algorithm),
            channel=Channel(),
            reporter=Reporter(self.bus, [self.recorder]),
            history=self._history(state),
            filters=GroupFilters(self.filters, max_in_a_row=self.max_filtered_in_a_row),
            examiner=self.examiner,
        )
        return self.learner

    def _history(self, state: LearnerState) -> History:
        history = History(self.directory / HISTORY_FILE, run_epoch=state.run_epoch)
        history.begin(step=state.step, kept=state.history, max_staleness=self.max_staleness, settings={})
        return history

    def _state(self, resume: bool) -> tuple[LearnerState, Path | None]:
        found = latest(self.directory / "checkpoints") if resume else None
        if found is not None:
            state, folder = found
            epoch = state.run_epoch + 1
            forks = state.forks | {epoch: state.policy_version}
            values = {name: getattr(state, name) for name in LearnerState.__dataclass_fields__}
            return LearnerState(**(values | {"run_epoch": epoch, "forks": forks})), folder
        return (
            LearnerState(
                run_epoch=1 if resume else 0,
                step=0,
                policy_version=0,
                groups={"watermark": 0, "beyond": []},
                consumed={"watermark": 1, "beyond": []},
                prompts=PromptState(),
                forks={1: 0} if resume else {},
            ),
            None,
        )

    async def run_learner(self, *, resume: bool = False) -> Learner:
        learner = self.build(resume=resume)
        await supervise(learner, self.prompts, Heart(learner))
        return learner

    @property
    def trained_groups(self) -> int:
        """Groups in every batch trained by this backend."""
        documents = sum(len(m.boundaries) - 1 for step in self.backend.trained for m in step)
        return documents // self.group_size


def worker(
    bus: Bus, engine: Engine, *, name: str = "w0", load: str = "in_flight", max_staleness: int = 2, **changes: Any
) -> tuple[RolloutWorker, WeightFollower]:
    follower = WeightFollower(
        f"{name}.weights", bus, engine=engine, verify=Channel().verify, load=load, max_staleness=max_staleness
    )
    settings: dict[str, Any] = {
        "rollout": single_turn,
        "reward": Judge(token_sum),
        "tokenizer": Tokenizer(),
        "seed": 0,
        "max_running": 8,
        "max_attempts": 3,
        "keep_seconds": 10.0,
    }
    return RolloutWorker(name, bus, engine=engine, follower=follower, **(settings | changes)), follower


async def run_worker(actors: tuple[RolloutWorker, WeightFollower]) -> None:
    main, follower = actors
    await supervise(main, follower, Heart(main))


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until ``condition``; the test's timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.001)
