"""Carries out what the group table says must follow: the history line first, then events, then progress.

Nobody hears of a group's fate before its line is in the history (history.py, H2): no line of this file awaits between
the table's event and ``record``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.sample_recorder import SampleRecorder
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.messages import Event, Progress
from asyncrl.messages.topics import EVENTS, PROGRESS
from asyncrl.messages.validation import LARGEST_KEY, length_on_bus
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.groups.table import GroupTable
from asyncrl.protocols import Bus
from asyncrl.state.history import History

LOOK_SECONDS: Final = 2.0

log = logging.getLogger("asyncrl.learner")


class ProgressReporter:
    """Speaks in the learner's ``name``."""

    def __init__(
        self,
        bus: Bus,
        *,
        name: str,
        table: GroupTable,
        history: History,
        disk: Disk | None = None,
        samples: SampleRecorder | None = None,
    ) -> None:
        self._bus = bus
        self._name = name
        self._table = table
        self._history = history
        self._disk = disk or Disk(WaitTracker())
        self._samples = samples

    def record(
        self, outcome: Outcome, *, batch: Batch | None = None, tokens: Mapping[int, NDArray[np.float32]] | None = None
    ) -> None:
        """Write what became of groups to the history. Call it before anything else can run. ``batch``: that of a
        step;  ``tokens``: of its documents, what the step thought of them (StepResult)."""
        if outcome.fate == "trained":
            self._history.trained(
                outcome.group_ids,
                sequences=outcome.sequences,
                step=outcome.step,
                max_staleness=outcome.max_staleness,
                old_parts=outcome.old_parts,
                old_tokens=outcome.old_tokens,
                replayed=outcome.replayed,
            )
        else:
            self._history.lost(outcome.fate, outcome.group_ids, step=outcome.step, cause=outcome.cause)
        if self._samples is not None:
            self._samples.note(
                outcome, incarnation=self._table.incarnation, forks=self._table.forks, batch=batch, tokens=tokens
            )

    async def recorded(self) -> None:
        """Wait until the history has every line: nothing that follows from one is told before."""
        while not self._history.is_written:
            await self._disk.written(functools.partial(asyncio.to_thread, self._history.flush), what="the history")

    async def announce(self, outcome: Outcome) -> None:
        """Record it, and tell whoever asks later."""
        self.record(outcome)
        for data in outcome.events:
            await self.event(outcome.fate, **data)

    async def event(self, kind: str, **data: object) -> None:
        """Tell of something once in this incarnation, for whoever asks later."""
        await self.recorded()
        event = Event(kind=kind, actor=self._name, time=time.time(), data=data)
        subject = next((data[name] for name in ("group_id", "sequence", "step", "life", "worker") if name in data), "")
        await self._bus.publish(EVENTS, event, key=f"{self._table.incarnation}-{kind}-{_short(str(subject))}")

    async def progress(self, *, is_finished: bool = False) -> None:
        """Report how far the run is; it lets prompts into the window."""
        await self.recorded()
        table = self._table
        reported = Progress(
            incarnation=table.incarnation,
            step=table.step,
            policy_version=table.policy_version,
            batches_taken=table.batches_taken,
            groups_trained=table.counts["trained"],
            groups_dropped=table.counts["dropped"],
            groups_failed=table.counts["failed"],
            groups_filtered=table.counts["filtered"],
            bound=table.bound.bound,
            finished=is_finished,
        )
        await self._bus.put(PROGRESS, reported)

    async def keep_progress(self) -> None:
        """Report again what the bus lost: without it no prompt enters the window, and no worker finds its weights. Runs
        until it is cancelled.

        consumes: nothing    waits for: the clock, every LOOK_SECONDS    woken by: nobody
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for what in await self._bus.restore():
                log.warning("the bus no longer has the learner's %s: reported again", what)

    @property
    def history_position(self) -> int:
        """Bytes of the history so far."""
        return self._history.position

    def sync(self) -> None:
        """The history outlives the machine when this returns. Blocks."""
        self._history.sync()

    def close(self) -> None:
        self._history.close()


def _short(subject: str) -> str:
    """As a part of a key: what others named (a life, a worker) may be longer than a key is."""
    if length_on_bus(subject) <= LARGEST_KEY:
        return subject
    return hashlib.sha256(subject.encode(errors="replace")).hexdigest()
