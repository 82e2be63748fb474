"""Trains continuously on groups from the trajectory log and announces the new weights.

    log -> group table -> batcher -> trainer -> weight version -> progress -> metrics -> checkpoint

Invariants (tests/actors/test_loop.py, test_loop_resume.py, tests/integration/learning/test_learning.py):
  L1 Step n turns policy version n - 1 into n; version 0 is the initial weights.
  L2 Nothing blocks the event loop: steps, exports and saves run in the backend's thread, files and hashing in another.
  L3 Every group leaves the window as trained, dropped, failed or filtered, and progress reports it. So a window of dead
     groups cannot stop the run silently.
  L4 The log is trimmed only up to the durable checkpoint before the newest, and not while steps are skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl import os_process
from asyncrl.actors.base import Actor
from asyncrl.actors.learner.batcher import Batcher, Prepared
from asyncrl.actors.learner.checkpointer import Checkpointer
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.learner.failed_batches import FailedBatches
from asyncrl.actors.learner.metrics_reporter import MetricsReporter, table_metrics, table_numbers
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.actors.learner.trajectory_reader import TrajectoryReader
from asyncrl.backends.port import StepResult
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import BusError, HopelessError, StepFailed
from asyncrl.messages import Heartbeat, replace
from asyncrl.messages.roles import WORKER
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.skipped_steps import SkippedSteps
from asyncrl.policies.metric import Metric

CHECK_SECONDS: Final = 2.0


class Learner(Actor):
    """consumes: trajectories    waits for: a full batch    woken by: a rollout worker's publish

    ``table`` is the learner's state; its parts put events into the table and carry out the consequences.
    """

    role = "learner"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        run: RunConfig,
        table: GroupTable,
        reader: TrajectoryReader,
        batcher: Batcher,
        trainer: Trainer,
        checkpointer: Checkpointer,
        progress: ProgressReporter,
        metrics: MetricsReporter,
        disk: Disk | None = None,
        failed_batches: FailedBatches | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        """
        failed_batches  None keeps none
        evaluator       None evaluates nothing
        """
        super().__init__(name, bus)
        self.waits = trainer.waits
        self._run = run
        self.table = table
        self._reader = reader
        self._batcher = batcher
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._progress = progress
        self._metrics = metrics
        self._disk = disk or Disk(trainer.waits)
        self._failed_batches = failed_batches or FailedBatches()
        self._evaluator = evaluator
        self._has_failed = False  # whether the last batch could not be trained
        self._skipped = SkippedSteps(run.learner.max_skipped_steps)
        self._trained_of: set[str] = set()  # workers whose groups were trained
        self._reporting: asyncio.Task[None] | None = None
        self._last_end = time.monotonic()
        self._load_seconds: float | None = None  # startup time until it could train; reported with the first step
        self.is_finished = False
        """Whether all steps that there is data for are trained and the last evaluation is over."""

    # -- start to stop -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._trainer.start()
        self._last_end = time.monotonic()

    async def run(self) -> None:
        await self._reader.start()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._reader.read(), name=f"{self.name}.read")
            checking = group.create_task(self._check_bus(), name=f"{self.name}.check-bus")
            evaluating = await self._start_evaluator(group)
            if self.table.incarnation > 0 or self._trainer.must_publish_at_start or self._evaluates_first:
                await self._publish_weights(group)
            await self._progress.progress()
            self._load_seconds = os_process.age_seconds()
            await self._train(group)
            await self._finish(group)
            for task in (reading, checking, *evaluating):
                task.cancel()

    async def _check_bus(self) -> None:
        """Raises BusLost, which ends the run, if what the run has on the bus was deleted or is older than the run.

        waits for: the clock, every CHECK_SECONDS
        """
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.bus.check()
            except BusError as error:  # it is up but too busy to answer; a bus that is away is waited for
                self.log.warning("the bus cannot be checked now: %s", error)

    async def _start_evaluator(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        if self._evaluator is None:
            return []
        await self._evaluator.start()
        return [group.create_task(self._evaluator.run(), name=f"{self.name}.evaluate")]

    @property
    def _evaluates_first(self) -> bool:
        return self._evaluator is not None and self.step == 0 and self._evaluator.needs_first_version

    async def stop(self) -> None:
        await self._trainer.stop()
        await self._metrics.close()
        self._progress.close()
        self._trainer.close()

    def drain(self) -> None:
        super().drain()
        self._batcher.drain()

    @property
    def step(self) -> int:
        return self.table.step

    @property
    def policy_version(self) -> int:
        return self.table.policy_version

    @property
    def version(self) -> tuple[int, int]:
        return (self.table.incarnation, self.table.policy_version)

    @property
    def done(self) -> bool:
        """Whether all steps of the run are trained."""
        return self.step >= self._run.run.steps

    def heartbeat(self) -> Heartbeat:
        beat: Heartbeat = replace(super().heartbeat(), problem=self.table.problem)
        return beat

    def numbers(self) -> dict[str, float]:
        return {
            **table_numbers(self.table),
            "learner/window": self._run.window,
            "learner/skipped_in_a_row": self._skipped.in_a_row,
            "learner/disk_need": self._checkpointer.disk_need,
            **self._metrics.alarms(),
        }

    @property
    def newest_metrics(self) -> Mapping[str, float]:
        """Metrics of the last reported step and evaluation, by names of the schema."""
        return {**self._metrics.newest_evaluation.numbers, **self._metrics.newest.numbers}

    @property
    def counts(self) -> str:
        """A summary of what happened to the groups, for people."""
        return self.table.describe()

    # -- table -> step -------------------------------------------------------------------------------------------------

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """consumes: the table    waits for: a full batch    woken by: the reader, the end of the data, drain"""
        started, held = time.monotonic(), 0.0  # both since the last step, including rejected batches
        while not self.done and not self.draining.is_set():
            await self._trainer.leave_gpus()
            with self.waiting("trajectories", on=WORKER) as wait:
                taken = await self._batcher.take(wait)
            if taken is None:
                return
            held += self._batcher.held_seconds
            if self._run.run.mode == "one_step_off":  # taking a batch admits the next one
                await self._progress.progress()
            try:
                with self._failed_batches.attempt(taken):
                    prepared = await self._batcher.prepare(taken, owner=group)
                    groups = [one.group for one in taken]
                    if await self._reader.reject_batch(groups, prepared.batch.documents, self._trainer.rescore):
                        continue  # take another batch
                    waited, began = time.monotonic() - started, time.monotonic()
                    result = await self._step(prepared, group)
            except StepFailed as error:
                await self._fail(taken, error)
                started, held = time.monotonic(), 0.0
                continue
            self._has_failed = False
            seconds = {
                "learner/wait_seconds": waited,
                "learner/held_seconds": held,
                "learner/step_seconds": time.monotonic() - began,
            }
            await self._trained(taken, prepared, result, seconds=seconds, group=group)
            started, held = time.monotonic(), 0.0

    async def _step(self, prepared: Prepared, group: asyncio.TaskGroup) -> StepResult:
        """Do one step while the next batch is prepared."""
        ahead = group.create_task(self._batcher.prepare_ahead(owner=group))
        try:
            return await self._trainer.step(prepared, step=self.step)
        finally:
            ahead.cancel()

    async def _fail(self, batch: Sequence[BufferedGroup], error: StepFailed) -> None:
        """Fail the groups of a batch that raised: nothing has changed. Raises HopelessError at the second in a row."""
        groups = [one.group for one in batch]
        folder = await asyncio.to_thread(self._failed_batches.keep, groups, step=self.step + 1, error=error)
        kept = f"; its batch is in {folder}" if folder is not None else ""
        self.log.error("step %d failed: %s%s", self.step + 1, error, kept, exc_info=error.__cause__)
        self.table.put_back()
        await self._reader.reject({one.group_id: str(error) for one in groups})
        if self._has_failed:
            raise HopelessError(f"two batches in a row could not be trained; the last: {error}{kept}")
        self._has_failed = True

    async def _trained(
        self,
        taken: Sequence[BufferedGroup],
        prepared: Prepared,
        result: StepResult,
        *,
        seconds: Mapping[str, float],
        group: asyncio.TaskGroup,
    ) -> None:
        """Carry out all consequences of a step on ``taken``."""
        batch = prepared.batch
        outcome = self.table.trained(
            max_staleness=batch.max_staleness, old_parts=batch.old_parts, old_tokens=batch.old_tokens
        )
        self._progress.record(outcome, batch=prepared.batch, tokens=result.tokens)
        await self._progress.recorded()
        metrics: dict[str, Metric] = {
            "time": time.time(),
            **seconds,
            "learner/prepare_seconds": prepared.seconds,
            "data/epoch": float(max(one.group.epoch for one in taken)),
        }
        if self.step % self._run.weights.every_steps == 0:
            await self._publish_weights(group)
        await self._announce_step(taken)
        elapsed = max(time.monotonic() - self._last_end, 1e-9)
        self._last_end = time.monotonic()
        metrics |= {
            "learner/idle_ratio": seconds["learner/wait_seconds"] / elapsed,
            "learner/tokens_per_second": prepared.batch.num_tokens / elapsed,
        }
        metrics = dict(prepared.batch.metrics) | dict(result.metrics) | metrics | self._own_metrics()
        await self._report(metrics, taken, group)
        await self._note_skipped(taken, result.metrics)
        if self._checkpointer.is_due(self.step) and not self.done:
            await self._checkpointer.begin(trims=not self._skipped.in_a_row, group=group)

    async def _announce_step(self, taken: Sequence[BufferedGroup]) -> None:
        """Report what the step changed for workers and the window."""
        for worker in sorted({one.group.worker for one in taken} - self._trained_of):
            self._trained_of.add(worker)
            await self._progress.event("first_trained", worker=worker)
        await self._progress.progress()

    async def _note_skipped(self, taken: Sequence[BufferedGroup], metrics: Mapping[str, float]) -> None:
        """Report a step that changed no weights. Raises HopelessError after too many such steps in a row."""
        if not (text := self._skipped.note(self.step, metrics)):
            return
        self.log.error("%s", text)
        groups = [one.group_id for one in taken]
        await self._progress.event("skipped", step=self.step, group_ids=groups, problem=text)
        if self._skipped.are_too_many:
            if self._reporting is not None:
                await self._reporting
            raise HopelessError(
                f"too many steps were skipped (learner.max_skipped_steps): {text}. Usual causes: a learning rate too "
                "high, an initial model that is broken, extreme rewards"
            )

    # -- step -> weights, metrics, end of the run ----------------------------------------------------------------------

    async def _publish_weights(self, group: asyncio.TaskGroup) -> None:
        if not self._metrics.num_workers:  # before the first report; uncounted engines would all load at once
            await self._metrics.workers()
        incarnation, policy_version = self.version
        await self._trainer.publish_weights(
            incarnation=incarnation,
            policy_version=policy_version,
            num_engines=self._metrics.num_workers,
            group=group,
        )

    async def _finish(self, group: asyncio.TaskGroup) -> None:
        """Write the last weights and a checkpoint to disk, then report that the run is over."""
        if self.step % self._run.weights.every_steps:
            await self._publish_weights(group)
        await self._trainer.weights_published()
        if self._reporting is not None:
            await self._reporting
        await self._trainer.take_gpus()
        await self._checkpointer.write(trims=not self._skipped.in_a_row)
        await self._trainer.leave_gpus()
        if self.draining.is_set() and not self.done:
            return
        if self._evaluator is None or await self._evaluator.finish_unless(self.draining):
            await self._progress.progress(is_finished=True)
            self.is_finished = True

    async def _report(
        self, metrics: Mapping[str, Metric], taken: Sequence[BufferedGroup], group: asyncio.TaskGroup
    ) -> None:
        """Report a step while the next one runs, because it asks the bus and workers. Steps are reported in order."""
        if self._reporting is not None:
            await self._reporting
        table = self.table
        self._reporting = group.create_task(
            self._report_step(table.step, metrics, taken, policy_version=table.policy_version, cursor=table.cursor)
        )

    async def _report_step(
        self, step: int, metrics: Mapping[str, Metric], taken: Sequence[BufferedGroup], **of_now: int
    ) -> None:
        await self._metrics.report(step, metrics, disk=self._disk, groups=taken, **of_now)
        await self._progress.event("trained", step=step, group_ids=[one.group_id for one in taken])

    def _own_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            **table_metrics(self.table, now=time.monotonic()),
            **self._reader.metrics(),
            **self._trainer.metrics(),
            **self._checkpointer.take_metrics(),
        }
        if self._load_seconds is not None:
            metrics["learner/load_seconds"] = self._load_seconds
        self._load_seconds = None
        return metrics
