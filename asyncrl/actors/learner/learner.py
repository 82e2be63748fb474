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
from asyncrl.actors.learner.batcher import Batcher, PreparedBatch
from asyncrl.actors.learner.checkpointer import Checkpointer
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.learner.failed_batches import FailedBatches
from asyncrl.actors.learner.group_remover import GroupRemover
from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.learner.metrics_reporter import MetricsReporter, table_metrics, table_numbers
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.actors.learner.trajectory_reader import TrajectoryReader
from asyncrl.actors.learner.validator import Suspects, Validator
from asyncrl.backends.port import StepResult
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import BusError, HopelessError, StepFailed
from asyncrl.messages import Heartbeat, replace
from asyncrl.messages.roles import WORKER
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.topics import PROGRESS
from asyncrl.policies.batching.batch import Batch
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
        validator: Validator,
        remover: GroupRemover,
        batcher: Batcher,
        trainer: Trainer,
        checkpointer: Checkpointer,
        progress: ProgressReporter,
        metrics: MetricsReporter,
        workers: LiveWorkers,
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
        self._validator = validator
        self._remover = remover
        self._batcher = batcher
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._progress = progress
        self._metrics = metrics
        self._workers = workers
        self._disk = Disk(trainer.waits)
        self._failed_batches = failed_batches or FailedBatches()
        self._evaluator = evaluator
        self._has_failed = False  # whether the last batch could not be trained
        self._skipped = SkippedSteps(run.learner.max_skipped_steps)
        self._trained_of: set[str] = set()  # workers whose groups were trained
        self._reporting: asyncio.Task[None] | None = None
        self._last_end = time.monotonic()
        self._wait_began: float | None = None  # since when a batch is waited for; None during a step
        self._straggler_wait_seconds = 0.0
        self._seconds: dict[str, float] = {}  # of the last step
        self._load_seconds: float | None = None  # startup time until it could train; reported with the first step
        self.is_finished = False
        """Whether all steps that there is data for are trained and the last evaluation is over."""

    # -- start to stop -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._trainer.start()
        self._last_end = time.monotonic()

    async def run(self) -> None:
        await self._reader.start()
        await self._validator.start()
        async with asyncio.TaskGroup() as self._tasks:
            beside = [
                self._tasks.create_task(self._reader.read(), name=f"{self.name}.read"),
                self._tasks.create_task(self._check_bus(), name=f"{self.name}.check-bus"),
                self._tasks.create_task(self._end_if_superseded(), name=f"{self.name}.end-if-superseded"),
            ]
            if self._evaluator is not None:
                await self._evaluator.start()
                beside.append(self._tasks.create_task(self._evaluator.run(), name=f"{self.name}.evaluate"))
            if self.table.incarnation > 0 or self._evaluates_first:  # engines start with version 0 of incarnation 0
                await self._publish_weights()
            await self._progress.publish_progress()
            self._load_seconds = os_process.age_seconds()
            await self._train()
            await self._finish()
            for task in beside:
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

    async def _end_if_superseded(self) -> None:
        """Raises HopelessError once a learner that began later has the run, as after this process was frozen for long.

        consumes: progress    waits for: a newer incarnation    woken by: the learner that took over
        """
        async with self.bus.watch(PROGRESS) as states:
            async for progress in states:
                if progress.incarnation > self.table.incarnation:
                    raise HopelessError(
                        f"another learner has taken over this run (incarnation {progress.incarnation}, step "
                        f"{progress.step}); this one, incarnation {self.table.incarnation} at step {self.step}, ends"
                    )

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
        beat: Heartbeat = replace(super().heartbeat(), problem=self.table.problem[:LONGEST_ERROR])
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
    def rang(self) -> Mapping[str, int]:
        """Name of an alarm -> the last step at which it was on."""
        return self._metrics.rang

    @property
    def counts(self) -> str:
        """A summary of what happened to the groups, for people."""
        return self.table.describe()

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """consumes: the table    waits for: a full batch    woken by: the reader, the end of the data, drain"""
        while not self.done and not self.draining.is_set():
            groups = await self._take()
            if groups is None:
                return  # the data has ended, or the learner is drained
            try:
                with self._failed_batches.attempt(groups):
                    prepared = await self._batcher.prepare(groups, owner=self._tasks)  # while the last step ran
                    if await self._remove_suspects(groups, prepared):
                        continue  # take another batch
                    result = await self._step(prepared)
            except StepFailed as error:  # nothing has changed
                await self._fail(groups, error)
                continue
            await self._record(prepared.batch, result)  # history: the groups have left the window
            await self._publish_weights_if_due()  # returns at once; engines follow
            await self._report(groups, prepared.batch, result)  # progress, which admits prompts; metrics
            await self._checkpoint_if_due()

    async def _take(self) -> list[BufferedGroup] | None:
        """Wait for a full batch of groups within the staleness bound, and mark it as in training."""
        await self._trainer.leave_gpus()
        if self._wait_began is None:  # else the last batch was put back
            self._wait_began, self._straggler_wait_seconds = time.monotonic(), 0.0
        with self.waits.waiting("trajectories", on=WORKER) as wait:
            groups = await self._batcher.take(wait)
        self._straggler_wait_seconds += self._batcher.straggler_wait_seconds
        if groups is not None and self._run.run.mode == "one_step_off":  # taking a batch admits the next one
            await self._progress.publish_progress()
        return groups

    async def _step(self, prepared: PreparedBatch) -> StepResult:
        """Do one step while the next batch is prepared."""
        assert self._wait_began is not None
        began = time.monotonic()
        ahead = self._tasks.create_task(self._batcher.prepare_ahead(owner=self._tasks))
        try:
            result = await self._trainer.step(prepared, step=self.step)
        finally:
            ahead.cancel()
        self._seconds = {
            "learner/wait_seconds": began - self._wait_began,
            "learner/straggler_wait_seconds": self._straggler_wait_seconds,
            "learner/step_seconds": time.monotonic() - began,
            "learner/prepare_seconds": prepared.seconds,
        }
        self._wait_began = None
        return result

    async def _record(self, batch: Batch, result: StepResult) -> None:
        """Write to the history that the batch is trained. Its effects become visible only afterwards."""
        self._has_failed = False
        outcome = self.table.trained(
            max_staleness=batch.max_staleness, old_trajectories=batch.old_trajectories, old_tokens=batch.old_tokens
        )
        self._progress.record(outcome, batch=batch, tokens=result.tokens)
        await self._progress.flush()

    async def _publish_weights_if_due(self) -> None:
        if self.step % self._run.weights.every_steps == 0:
            await self._publish_weights()

    async def _publish_weights(self) -> None:
        incarnation, policy_version = self.version
        until_next = range(self.step, self.step + self._run.weights.every_steps)
        await self._trainer.publish_weights(
            incarnation=incarnation,
            policy_version=policy_version,
            num_engines=await self._workers.count(),
            group=self._tasks,
            is_kept=any(map(self._checkpointer.is_due, until_next)),  # a checkpoint comes with the model engines have
        )

    async def _report(self, groups: Sequence[BufferedGroup], batch: Batch, result: StepResult) -> None:
        """Report a step: first_trained events, progress, metrics. Raises HopelessError after too many skipped steps."""
        at = time.time()
        for worker in sorted({one.group.worker for one in groups} - self._trained_of):
            self._trained_of.add(worker)
            await self._progress.publish_event("first_trained", worker=worker)
        await self._progress.publish_progress()
        elapsed = max(time.monotonic() - self._last_end, 1e-9)
        self._last_end = time.monotonic()
        metrics = {
            **batch.metrics,
            **result.metrics,
            **self._seconds,
            **self._own_metrics(),
            "time": at,
            "data/epoch": float(max(one.group.epoch for one in groups)),
            "learner/elapsed_seconds": elapsed,
            "learner/idle_ratio": self._seconds["learner/wait_seconds"] / elapsed,
            "learner/tokens_per_second": batch.num_tokens / elapsed,
        }
        await self._wait_for_report()  # steps are reported in order
        step, cursor = self.table.step, self.table.cursor
        self._reporting = self._tasks.create_task(self._report_metrics(step, metrics, groups, cursor=cursor))
        await self._record_skipped(groups, result.metrics)

    async def _checkpoint_if_due(self) -> None:
        if self._checkpointer.is_due(self.step) and not self.done:
            await self._checkpointer.begin(trims=not self._skipped.in_a_row, group=self._tasks)

    # -- what is rare --------------------------------------------------------------------------------------------------

    async def _fail(self, taken: Sequence[BufferedGroup], error: StepFailed) -> None:
        """Keep a batch that raised on disk and fail its groups. Raises HopelessError at the second in a row."""
        self._wait_began = None
        groups = [one.group for one in taken]
        folder = await asyncio.to_thread(self._failed_batches.keep, groups, step=self.step + 1, error=error)
        kept = f"; its batch is in {folder}" if folder is not None else ""
        self.log.error("step %d failed: %s%s", self.step + 1, error, kept)
        if error.__cause__ is not None:  # in the log file alone
            self.log.info("where it was raised:", exc_info=error.__cause__)
        self.table.put_back()
        problems = {one.group_id: f"a training step with it fails: {error}" for one in groups}
        await self._remover.fail(problems, is_of_workers=False)
        if self._has_failed:
            raise HopelessError(f"two batches in a row could not be trained; the last: {error}{kept}")
        self._has_failed = True

    async def _remove_suspects(self, taken: Sequence[BufferedGroup], prepared: PreparedBatch) -> bool:
        """Return whether the batch has answers that must not be trained; then it is put back without them.

        The trainer computes the logprobs of a few answers again (logprob_mismatch.py). Those of a worker whose logprobs
        are not the policy's are dropped, and so are those of a worker that was quarantined since they were buffered. A
        group with taken-over tokens that are not the policy's is failed."""
        groups = [one.group for one in taken]
        suspects = Suspects()
        if (to_check := self._validator.choose(prepared.batch.sequences, groups, step=self.step)) is not None:
            logprobs = await self._trainer.compute_logprobs(to_check.sequences)
            without_experts = await self._trainer.compute_logprobs(list(to_check.without_experts.values()))
            suspects = self._validator.check_logprobs(to_check, logprobs, without_experts)
        has_quarantined = any(group.worker in self._validator.quarantined for group in groups)
        if not suspects.workers and not suspects.sequences and not has_quarantined:
            return False
        self.table.put_back()
        for worker, reason in suspects.workers.items():
            await self._remover.quarantine(worker, reason)
        await self._remover.drop_quarantined()
        ids = [group.group_id for group in groups for _ in group.trajectories]  # of each sequence
        await self._remover.fail({ids[index]: problem for index, problem in suspects.sequences.items()})
        return True

    async def _record_skipped(self, groups: Sequence[BufferedGroup], metrics: Mapping[str, float]) -> None:
        """Report a step that changed no weights. Raises HopelessError after too many such steps in a row."""
        if not (text := self._skipped.note(self.step, metrics)):
            return
        self.log.error("%s", text)
        ids = [one.group_id for one in groups]
        await self._progress.publish_event("skipped", step=self.step, group_ids=ids, problem=text)
        if self._skipped.are_too_many:
            await self._wait_for_report()
            raise HopelessError(
                f"too many steps were skipped (learner.max_skipped_steps): {text}. Usual causes: a learning rate too "
                "high, an initial model that is broken, extreme rewards"
            )

    # -- metrics, end of the run ---------------------------------------------------------------------------------------

    async def _report_metrics(
        self, step: int, metrics: Mapping[str, Metric], groups: Sequence[BufferedGroup], *, cursor: int
    ) -> None:
        """Report a step's metrics while the next one runs, because this asks the bus and waits for sinks."""
        workers = await self._workers.beats()
        await self._metrics.report(step, metrics, workers=workers, cursor=cursor, disk=self._disk, groups=groups)
        await self._progress.publish_event("trained", step=step, group_ids=[one.group_id for one in groups])

    async def _wait_for_report(self) -> None:
        """Wait until the last step is reported."""
        if self._reporting is not None:
            await self._reporting

    async def _finish(self) -> None:
        """Write a checkpoint and the last weights to disk, then report that the run is over.

        The checkpoint comes first: the weights may wait for their disk until this process is killed.
        """
        if self.step % self._run.weights.every_steps:
            await self._publish_weights()
        await self._wait_for_report()
        await self._trainer.take_gpus()
        await self._checkpointer.write(trims=not self._skipped.in_a_row)
        await self._trainer.weights_published()
        await self._trainer.leave_gpus()
        if self.draining.is_set() and not self.done:
            return
        if self._evaluator is None or await self._evaluator.finish_unless(self.draining):
            await self._progress.publish_progress(is_finished=True)
            self.is_finished = True

    def _own_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            **table_metrics(self.table, now=time.monotonic()),
            **self._validator.metrics(),
            **self._trainer.metrics(),
            **self._checkpointer.take_metrics(),
        }
        if self._load_seconds is not None:
            metrics["learner/load_seconds"] = self._load_seconds
        self._load_seconds = None
        return metrics
