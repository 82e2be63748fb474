"""The learner's checkpoints: one per step at most, and the log is trimmed behind the one before the newest.

So when the newest checkpoint turns out damaged, or somebody deletes it, the learner goes on from the one before and
finds every group on the log. With checkpoint.keep = 1 there is none before: the log is trimmed behind the newest.
"""

from __future__ import annotations

import functools
import logging
import shutil
import time
from pathlib import Path

from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.config import RunConfig
from asyncrl.errors import BusError
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.batching.batch import Metric
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.table import GroupTable
from asyncrl.protocols import Bus, LogMark
from asyncrl.state import checkpoint

log = logging.getLogger("asyncrl.learner")


class Checkpointer:
    """Saves the group table with the trainer's model (asyncrl/state/checkpoint.py)."""

    def __init__(
        self,
        run: RunConfig,
        bus: Bus,
        *,
        table: GroupTable,
        trainer: Trainer,
        progress: ProgressReporter,
        disk: Disk | None = None,
    ) -> None:
        self._bus = bus
        self._table = table
        self._trainer = trainer
        self._progress = progress
        self._disk = disk or Disk(trainer.waits)
        self._section = run.checkpoint
        self._groups_per_batch = run.learner.groups_per_batch
        self._directory = run.run_directory / "checkpoints"
        self._step = -1  # of the last checkpoint of this incarnation
        self._seconds: float | None = None  # of the one written since metrics were last taken
        self.disk_need = 0.0
        """Share of the free bytes of its disk that another checkpoint takes, when the last one was written."""

    def is_due(self, step: int) -> bool:
        """Whether the run file asks for a checkpoint after this step."""
        every = self._section.every_steps
        return bool(every) and step % every == 0

    async def write(self, *, trims: bool) -> None:
        """Write one, unless this step has one: what arrived since then is read from the log again.

        trims: what the checkpoint before has consumed may leave the log. Raises CheckpointError.
        """
        if self._table.step == self._step:
            return
        # The ledgers and the history's length are of one instant (history.py, H1): nothing awaits between them.
        logs_changed = self._table.logs_changed
        state = self._table.save(groups_per_batch=self._groups_per_batch, history=self._progress.history_position)
        sync = functools.partial(self._trainer.call, self._progress.sync, what="its history to be written", on="disk")
        await self._disk.written(sync, what="the history")
        started = time.monotonic()
        write = functools.partial(self._write, state)
        call = functools.partial(self._trainer.call, write, what="a checkpoint to be written", on="disk")
        folder, self.disk_need = await self._disk.written(call, what="a checkpoint")
        self._step = state.step
        log.info("checkpoint %s", folder)
        if logs_changed == self._table.logs_changed:  # else its sequences mean records of a log that is gone
            through = self._table.checkpointed(state)
            if self._section.keep == 1:
                through = state.consumed["watermark"] - 1
            if trims and through and not self._section.keep_log:
                await self._trim(through=through)
        self._seconds = time.monotonic() - started

    def take_metrics(self) -> dict[str, Metric]:
        """Since this was last asked."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"learner/checkpoint_seconds": seconds}

    def _write(self, state: LearnerState) -> tuple[Path, float]:
        """Its folder, and ``disk_need`` behind it. Blocks."""
        save, keep = self._trainer.save, self._section.keep
        folder = checkpoint.write(self._directory, state, save_backend=save, keep=keep)
        return folder, _disk_need(folder)

    async def _trim(self, *, through: int) -> None:
        """What a full disk keeps us from forgetting now is forgotten behind the next checkpoint."""
        sequence, stored = self._table.last_read
        mark = LogMark(log=self._table.log, sequence=sequence, stored=stored)
        try:
            if (await self._bus.log_state(TRAJECTORIES, mark=mark)).problem:
                return  # another log, whose records are not what we have read; the reader says so
            await self._bus.trim(TRAJECTORIES, through=through, log=mark.log)
        except BusError as error:
            log.warning("the log is not trimmed: %s", error)


def _disk_need(folder: Path) -> float:
    """Share of the free bytes of its disk that another folder like it takes; 0 when nobody can tell."""
    try:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return num_bytes / max(1, shutil.disk_usage(folder).free)
    except OSError:
        return 0.0
