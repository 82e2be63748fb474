"""Trains continuously on what the trajectory log brings, and says where the new weights are.

    log -> buffer -> batch feed -> training step -> weight version -> progress -> metrics -> checkpoint

Invariants (tests/test_actors.py, tests/test_learning.py):
  L1 step n turns policy version n - 1 into n; version 0 is the initial weights.
  L2 nothing blocks the event loop: steps, exports and saves run in the backend's thread, files and hashing in another.
  L3 a group leaves the window as trained, dropped or buried, and progress says so: a window of dead groups cannot
     stop the run in silence.
  L4 the log is trimmed only behind a durable checkpoint, and not while steps are skipped.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncrl import processes
from asyncrl.actors.base import Actor
from asyncrl.actors.batch_feed import BatchFeed, Prepared
from asyncrl.actors.checkpoints import Checkpoints
from asyncrl.actors.examiner import Examiner
from asyncrl.actors.group_filters import GroupFilters
from asyncrl.actors.intake import Intake, Standing
from asyncrl.actors.prompt_source import PromptSource
from asyncrl.actors.reporter import Reporter
from asyncrl.actors.training_step import TrainingStep
from asyncrl.actors.weight_publisher import WeightPublisher
from asyncrl.checkpoint import LearnerState
from asyncrl.errors import HopelessError
from asyncrl.history import History
from asyncrl.policies.batch import Metric
from asyncrl.policies.buffer import Buffer, Held
from asyncrl.policies.faults import FIRST_SECONDS, WORKER
from asyncrl.policies.skipped import SkippedSteps
from asyncrl.protocols import Backend, Bus, WeightChannel
from asyncrl.topics import PROGRESS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The part of the run file that the loop itself reads."""

    steps: int
    mode: str
    learning_rate: float
    warmup_steps: int
    checkpoint_directory: Path
    checkpoint_every: int
    checkpoint_keep: int
    keep_log: bool
    max_buried_in_a_row: int
    max_skipped_steps: int = 0
    publish_every: int = 1


class Learner(Actor):
    """consumes: trajectories    waits for: a full batch    woken by: a rollout worker's publish"""

    role = "learner"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        settings: LearnerSettings,
        state: LearnerState,
        restore_from: Path | None,
        buffer: Buffer,
        prompts: PromptSource,
        feed: BatchFeed,
        backend: Backend,
        training: TrainingStep,
        channel: WeightChannel,
        reporter: Reporter,
        history: History,
        filters: GroupFilters | None = None,
        examiner: Examiner | None = None,
    ) -> None:
        super().__init__(name, bus)
        self._settings = settings
        self._restore_from = restore_from
        self._buffer = buffer
        self._prompts = prompts
        self._feed = feed
        self._backend = backend
        self._training = training
        self._weights = WeightPublisher(bus, channel, waits=self.waits, fork=state.policy_version)
        self._reporter = reporter
        self._history = history
        self._standing = Standing.of(state)
        self._batches_taken = state.step
        self._trained_of: set[str] = set()
        self._lost_before_step = (state.groups_dropped, state.groups_filtered)
        self._skipped = SkippedSteps(settings.max_skipped_steps)
        self._examiner = examiner or Examiner(bus)
        self._intake = Intake(
            self,
            standing=self._standing,
            buffer=buffer,
            prompts=prompts,
            feed=feed,
            history=history,
            filters=filters,
            examiner=self._examiner,
            max_buried_in_a_row=settings.max_buried_in_a_row,
            report_progress=self._report_progress,
        )
        self._reporting: asyncio.Task[None] | None = None
        self._backend_thread = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._last_end = time.monotonic()
        self._export_seconds = 0.0
        self._checkpoints = Checkpoints(
            self,
            directory=settings.checkpoint_directory,
            keep=settings.checkpoint_keep,
            keep_log=settings.keep_log,
            in_backend=self._in_backend,
        )
        self._load_seconds: float | None = None  # until it could train; said with the first step

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._in_backend(self._backend.start, what="its backend to start", on="start")
        if self._restore_from is not None:
            restore = functools.partial(self._backend.restore, self._restore_from)
            await self._in_backend(restore, what="its checkpoint to be read", on="start")
        self._last_end = time.monotonic()

    async def run(self) -> None:
        await self._intake.check_log()
        await self._examiner.start()
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._intake.read(), name=f"{self.name}.read")
            exhaustion = group.create_task(self._note_exhaustion(), name=f"{self.name}.exhaustion")
            burial = group.create_task(self._intake.bury_unanswerable(), name=f"{self.name}.burial")
            if self.run_epoch > 0 or self._weights.sends:  # what engines go on from, and meet the learner for
                await self._publish_weights(group)
            await self._report_progress()
            self._load_seconds = processes.age_seconds()
            await self._train(group)
            await self._finish(group)
            reader.cancel()
            exhaustion.cancel()
            burial.cancel()

    async def stop(self) -> None:
        await self._in_backend(self._backend.close, what="its backend to close")
        self._reporter.close()
        self._history.close()
        self._backend_thread.shutdown(wait=False)
        self._weights.close()

    def drain(self) -> None:
        super().drain()
        self._feed.drain()

    @property
    def run_epoch(self) -> int:
        return self._standing.run_epoch

    @property
    def step(self) -> int:
        return self._standing.step

    @property
    def policy_version(self) -> int:
        return self._standing.policy_version

    @property
    def version(self) -> tuple[int, int]:
        return (self.run_epoch, self.policy_version)

    def numbers(self) -> dict[str, float]:
        dropped, filtered = self._lost_before_step
        return {
            "learner/buried_in_a_row": self._intake.buried_in_a_row,
            "learner/dropped_since_step": self._standing.dropped - dropped,
            "learner/filtered_since_step": self._standing.filtered - filtered,
            "learner/window": (self._feed.settings.max_staleness + 1) * self._feed.settings.groups_per_batch,
        }

    @property
    def done(self) -> bool:
        """Whether every step of the run was trained."""
        return self.step >= self._settings.steps

    @property
    def counts(self) -> str:
        """What became of the groups, for a person."""
        return str(self._standing)

    async def _note_exhaustion(self) -> None:
        await self._prompts.exhausted.wait()
        self._feed.wake()

    # -- buffer -> step ------------------------------------------------------------------------------------------------

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """consumes: the buffer    waits for: a full batch    woken by: the intake, the end of the data, drain"""
        while not self.done and not self.draining.is_set():
            started = time.monotonic()
            with self.waiting("trajectories", on=WORKER):
                taken = await self._feed.take(self.policy_version, drop=self._intake.drop)
            if taken is None:
                return
            self._batches_taken += 1
            if self._settings.mode == "one_step_off":  # taking a batch is what admits the next one
                await self._report_progress()
            prepared = await self._feed.prepare(taken, policy_version=self.policy_version, owner=group)
            if await self._examine(taken, prepared):
                self._batches_taken -= 1  # it is not trained: take another
                continue
            await self._train_on(taken, prepared, wait_seconds=time.monotonic() - started, group=group)

    async def _examine(self, taken: Sequence[Held], prepared: Prepared) -> bool:
        """Whether the batch holds answers of a worker that was found out just now; they are dropped."""
        documents = prepared.batch.documents
        chosen = self._examiner.chosen(documents, [held.group for held in taken], step=self.step)
        if chosen:
            judge = functools.partial(
                self._examiner.judged,
                chosen,
                documents,
                backend=self._backend,
                max_tokens=self._feed.settings.micro_batch_tokens,
            )
            found = await self._in_backend(judge, what="answers to be scored again")
            for worker, reason in found.items():
                await self._intake.quarantine(worker, reason)
        return any(held.group.worker in self._examiner.quarantined for held in taken)

    async def _train_on(
        self, taken: Sequence[Held], prepared: Prepared, *, wait_seconds: float, group: asyncio.TaskGroup
    ) -> None:
        """One step on ``taken``, and all that follows from it. The next batch is prepared while it runs."""
        started = time.monotonic()
        self._intake.in_training = {held.group.group_id for held in taken}
        ahead = group.create_task(self._feed.prepare_ahead(self.policy_version + 1, training=taken, owner=group))
        try:
            result = await self._in_backend(
                functools.partial(
                    self._training,
                    prepared.batch,
                    prepared.shares,
                    step=self.step,
                    learning_rate=self._training.learning_rate(
                        self.step, peak=self._settings.learning_rate, warmup_steps=self._settings.warmup_steps
                    ),
                ),
                what="a training step",
                on="step",
            )
        finally:
            ahead.cancel()
        ended = time.monotonic()
        self._intake.in_training = set()
        for held in taken:
            self._buffer.dispose(held)
        self._standing.trained += len(taken)
        self._lost_before_step = (self._standing.dropped, self._standing.filtered)
        self._standing.step += 1
        self._standing.policy_version += 1
        self._history.trained(
            [held.group.group_id for held in taken], step=self.step, max_staleness=prepared.batch.max_staleness
        )
        metrics: dict[str, Metric] = {
            "time": time.time(),
            "learner/wait_seconds": wait_seconds,
            "learner/prepare_seconds": prepared.seconds,
            "learner/step_seconds": ended - started,
            "data/epoch": float(max(held.group.epoch for held in taken)),
        }
        if self.step % self._settings.publish_every == 0:
            await self._publish_weights(group)
        for worker in sorted({held.group.worker for held in taken} - self._trained_of):
            self._trained_of.add(worker)
            await self._intake.event("first_trained", worker=worker)
        if changed := self._feed.adapt(result.metrics):
            await self._intake.event("bound", step=self.step, **changed)
        await self._report_progress()
        elapsed = max(time.monotonic() - self._last_end, 1e-9)
        self._last_end = time.monotonic()
        metrics |= {
            "learner/idle_ratio": wait_seconds / elapsed,
            "learner/tokens_per_second": prepared.batch.num_tokens / elapsed,
        }
        await self._report(dict(prepared.batch.metrics) | dict(result.metrics) | metrics | self._own_metrics(), group)
        await self._note_skipped(taken, result.metrics)
        every = self._settings.checkpoint_every
        if every and self.step % every == 0 and not self.done:
            await self._checkpoint()

    async def _note_skipped(self, taken: Sequence[Held], metrics: Mapping[str, float]) -> None:
        """Say that a step changed no weights. Raises HopelessError when too many in a row did not."""
        if not (text := self._skipped.note(self.step, metrics)):
            return
        self.log.error("%s", text)
        groups = [held.group.group_id for held in taken]
        await self._intake.event("skipped", step=self.step, group_ids=groups, problem=text)
        if self._skipped.are_too_many:
            if self._reporting is not None:
                await self._reporting
            raise HopelessError(
                f"too many steps were skipped (learner.max_skipped_steps): {text}. Usual causes: a learning rate too "
                "high, a model that was broken to begin with, rewards far out"
            )

    # -- step -> weights, progress, checkpoint -------------------------------------------------------------------------

    async def _publish_weights(self, group: asyncio.TaskGroup) -> None:
        """Snapshot now; send, write, hash and announce while the next step runs."""
        started = time.monotonic()
        snapshot = await self._in_backend(self._backend.export, what="a copy of the weights")
        self._export_seconds = time.monotonic() - started
        if not self._reporter.num_workers:  # before the first report; engines not counted would all take one turn
            await self._reporter.workers()
        self._weights.num_engines = self._reporter.num_workers
        await self._weights.publish(snapshot, run_epoch=self.run_epoch, policy_version=self.policy_version, group=group)

    async def _report_progress(self, *, finished: bool = False) -> None:
        bound = self._feed.bound.bound
        now = self._standing.progress(batches_taken=self._batches_taken, bound=bound, finished=finished)
        await self.bus.put(PROGRESS, now)

    async def _finish(self, group: asyncio.TaskGroup) -> None:
        """The last weights and a checkpoint are on disk before anybody is told that the run is over."""
        if self.step % self._settings.publish_every:
            await self._publish_weights(group)
        await self._weights.wait()
        if self._reporting is not None:
            await self._reporting
        await self._checkpoint()
        if not self.draining.is_set() or self.done:
            await self._report_progress(finished=True)

    async def _checkpoint(self) -> None:
        if self._checkpoints.has(self.step):
            return
        state = LearnerState(
            run_epoch=self.run_epoch,
            step=self.step,
            policy_version=self.policy_version,
            groups=self._buffer.groups.as_json(),
            consumed=self._buffer.consumed.as_json(),
            prompts=self._prompts.state(),
            groups_trained=self._standing.trained,
            groups_dropped=self._standing.dropped,
            groups_buried=self._standing.buried,
            groups_filtered=self._standing.filtered,
            groups_per_batch=self._feed.settings.groups_per_batch,
            forks=dict(self._buffer.forks),
            bound=self._feed.bound.state(),
            history=self._history.position,
        )
        await self._in_backend(self._history.sync, what="its history to be written", on="disk")
        await self._checkpoints.write(state, save_backend=self._backend.save, trims=not self._skipped.in_a_row)

    # -- small things --------------------------------------------------------------------------------------------------

    async def _report(self, metrics: Mapping[str, Metric], group: asyncio.TaskGroup) -> None:
        """Asking the bus and the workers goes on while the next step runs; steps are reported in order."""
        if self._reporting is not None:
            await self._reporting
        self._reporting = group.create_task(
            self._reporter.report(self.step, metrics, policy_version=self.policy_version, cursor=self._intake.cursor)
        )

    def _own_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            **self._intake.take_metrics(),
            **self._checkpoints.take_metrics(),
            "learner/run_epoch": float(self.run_epoch),
            "staleness/bound": float(self._feed.bound.bound),
            **{f"mismatch/{worker}/mean": mean for worker, mean in self._examiner.mismatch.items()},
            "rollout/quarantined": float(len(self._examiner.quarantined)),
            "weights/version": float(self.policy_version),
            "weights/publish_seconds": self._weights.seconds,
            "weights/publish_bytes": float(self._weights.num_bytes),
            "learner/export_seconds": self._export_seconds,
            "data/overlong_prompts": float(self._prompts.overlong),
        }
        if self._load_seconds is not None:
            metrics["learner/load_seconds"] = self._load_seconds
        self._load_seconds = None
        return metrics

    async def _in_backend(self, function: Callable[[], T], *, what: str, on: str = "backend") -> T:
        with self.waiting(what, on=on, first=FIRST_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(self._backend_thread, function)
