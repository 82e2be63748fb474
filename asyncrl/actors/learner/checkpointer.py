"""The learner's checkpoints: at most one per step. The log is trimmed only up to the checkpoint before the newest.

So if the newest checkpoint is damaged or deleted, the learner resumes from the one before it and finds every group on
the log. With checkpoint.keep = 1 there is no earlier one: the log is trimmed up to the newest.

Backends that support this write while the next steps run. A checkpoint does not exist until all of it is on disk: a
learner that dies before that resumes from the previous one, and nothing has been trimmed from the log. Only one is
written at a time; the next one waits.
Tests: tests/actors/learner/test_checkpointer.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import BusError, disk_problem
from asyncrl.messages.topics import TRAJECTORIES, group_id_of
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.metric import Metric

POLL_SECONDS: Final = 1.0
"""Interval between checks whether a checkpoint is written. Each is a short exchange of all ranks between two steps."""

_WRITING: Final = "a checkpoint to be written"

log = logging.getLogger("asyncrl.learner")


@dataclass(slots=True, kw_only=True)
class _OpenCheckpoint:
    """A checkpoint being written. trims: whether to trim the log once it is on disk; since: monotonic time."""

    state: LearnerState
    trims: bool
    since: float
    unfinished: checkpoint.UnfinishedCheckpoint | None = None


class Checkpointer:
    """Saves the group table with the trainer's model (asyncrl/actors/learner/checkpoint.py)."""

    def __init__(
        self,
        run: RunConfig,
        bus: Bus,
        *,
        table: GroupTable,
        trainer: Trainer,
        progress: ProgressReporter,
    ) -> None:
        self._bus = bus
        self._table = table
        self._trainer = trainer
        self._progress = progress
        self._disk = Disk(trainer.waits)
        self._section = run.checkpoint
        self._groups_per_batch = run.learner.groups_per_batch
        self._window = run.window
        self._directory = run.run_directory / "checkpoints"
        self._step = -1  # step of the last checkpoint of this incarnation
        self._open: _OpenCheckpoint | None = None  # the checkpoint being written
        self._finishing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._has_failed = False  # whether the disk made the last background write fail
        self._seconds: dict[str, float] = {}  # since metrics were taken last
        self.disk_need = 0.0
        """Share of the disk's free bytes that another checkpoint takes, measured when the last one was written."""

    def is_due(self, step: int) -> bool:
        """Return whether the run file asks for a checkpoint after this step, or the last one could not be written."""
        every = self._section.every_steps
        return bool(every) and (step % every == 0 or self._has_failed)

    async def begin(self, *, trims: bool, group: asyncio.TaskGroup) -> None:
        """Begin a checkpoint, which a task of ``group`` finishes. ``write`` it instead if the backend cannot save while
        it trains, or if the disk made the last background write fail.

        trims: once this checkpoint is written, groups that the previous one has consumed may leave the log. Raises
        CheckpointError.
        """
        await self._finish(wait=True)
        if self._has_failed or not self._trainer.saves_beside:
            await self.write(trims=trims)
        elif self._table.step != self._step:
            self._open = current = await self._take_state(trims=trims)
            try:
                begin = functools.partial(self._begin, current)
                await self._trainer.call(begin, what="a copy for a checkpoint", on="disk")
            except Exception as error:
                if disk_problem(error) is None:
                    raise
                self._open = None
                await self.write(trims=trims)
                return
            self._count_wait(since=current.since)
            self._finishing = group.create_task(self._keep_finishing(), name="learner.finish-checkpoint")

    async def write(self, *, trims: bool) -> None:
        """Write a checkpoint unless this step has one; later arrivals are read from the log again. See ``begin``."""
        await self._finish(wait=True)
        if self._table.step == self._step:
            return
        current = await self._take_state(trims=trims)

        def write() -> Path:
            self._begin(current)
            folder = self._finish_files(current, wait=True)
            assert folder is not None
            return folder

        attempt = functools.partial(self._trainer.call, write, what=_WRITING, on="disk")
        await self._announce(current, await self._disk.write(attempt, what="a checkpoint"))
        self._has_failed = False
        self._count_wait(since=current.since)

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call."""
        seconds, self._seconds = self._seconds, {}
        return dict(seconds)

    async def _take_state(self, *, trims: bool) -> _OpenCheckpoint:
        """Return the learner's current state. The history is on disk up to the length recorded in it."""
        # The ledgers and the history's length are from one instant (history.py, H1): nothing awaits between them.
        state = saved_table.save(
            self._table, groups_per_batch=self._groups_per_batch, history=self._progress.history_position
        )
        sync = functools.partial(self._trainer.call, self._progress.sync, what="its history to be written", on="disk")
        await self._disk.write(sync, what="the history")
        return _OpenCheckpoint(state=state, trims=trims, since=time.monotonic())

    async def _keep_finishing(self) -> None:
        """waits for: the ranks' threads, which send no notification    woken by: the clock"""
        while self._open is not None:
            await asyncio.sleep(POLL_SECONDS)
            await self._finish(wait=False)

    async def _finish(self, *, wait: bool) -> None:
        """Finish the checkpoint being written. Without ``wait``, do nothing if it is still being written."""
        began = time.monotonic()
        async with self._lock:
            if (current := self._open) is None:
                return
            try:
                finish = functools.partial(self._finish_files, current, wait=wait)
                if wait:
                    folder = await self._trainer.call(finish, what=_WRITING, on="disk")
                else:
                    folder = await self._trainer.between_steps(finish)
            except Exception as error:
                if disk_problem(error) is None:
                    raise
                log.error("%s; the next step is saved instead, and training waits for that save", error)
                self._open, self._has_failed = None, True
                return
            if folder is not None:
                self._open = None
                await self._announce(current, folder)
        if wait and self._finishing is not None:
            self._finishing.cancel()  # the task is asleep or waits for the lock
            self._count_wait(since=began)

    def _count_wait(self, *, since: float) -> None:
        before = self._seconds.get("learner/checkpoint_seconds", 0.0)
        self._seconds["learner/checkpoint_seconds"] = before + time.monotonic() - since

    def _begin(self, current: _OpenCheckpoint) -> None:
        """Begin to write the checkpoint. Blocks."""
        current.unfinished = checkpoint.begin(self._directory, current.state, save_backend=self._trainer.begin_save)

    def _finish_files(self, current: _OpenCheckpoint, *, wait: bool) -> Path | None:
        """Return the checkpoint's folder; None while it is being written. Blocks."""
        assert current.unfinished is not None
        finish = functools.partial(self._trainer.finish_save, current.unfinished.backend, wait=wait)
        folder = checkpoint.finish(current.unfinished, finish_backend=finish, keep=self._section.keep)
        if folder is not None:
            self.disk_need = _disk_need(folder)
        return folder

    async def _announce(self, current: _OpenCheckpoint, folder: Path) -> None:
        state = current.state
        self._step = state.step
        log.info("checkpoint %s", folder)
        through = self._table.checkpointed(state)
        if self._section.keep == 1:
            through = state.consumed["watermark"] - 1
        if current.trims and through:
            try:  # 0: remove only pieces that no entry of the log refers to
                through = 0 if self._section.keep_log else through
                await self._bus.trim(TRAJECTORIES, through=through, is_over=self._is_over)
            except BusError as error:  # a full disk prevents it; the next checkpoint trims
                log.warning("the log is not trimmed: %s", error)
        self._seconds["learner/checkpoint_write_seconds"] = time.monotonic() - current.since

    def _is_over(self, name: str) -> bool:
        """Return whether answers to this group can have no effect any more, or can never have been asked for."""
        group_id = group_id_of(name)
        return group_id is None or group_id in self._table.done or group_id > self._table.next_group_id + self._window


def _disk_need(folder: Path) -> float:
    """Return the share of the disk's free bytes that another such folder takes; 0 if unknown."""
    try:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return num_bytes / max(1, shutil.disk_usage(folder).free)
    except OSError:
        return 0.0
