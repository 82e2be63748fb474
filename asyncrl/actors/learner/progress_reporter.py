"""Carries out the consequences of group table events, in order: the history line, then events, then progress.

A group's fate is published only after its line is in the history (history.py, H2). So no code in this file awaits
between the table's event and ``record``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.history import History
from asyncrl.actors.learner.sample_recorder import SampleRecorder
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.messages import Event, Progress
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.topics import EVENTS, PROGRESS
from asyncrl.messages.validation import LARGEST_KEY, length_on_bus
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.groups.table import GroupTable

log = logging.getLogger("asyncrl.learner")


class ProgressReporter:
    """waits: the learner's wait tracker"""

    def __init__(
        self,
        bus: Bus,
        *,
        table: GroupTable,
        history: History,
        waits: WaitTracker | None = None,
        samples: SampleRecorder | None = None,
    ) -> None:
        self._bus = bus
        self._table = table
        self._history = history
        self._disk = Disk(waits or WaitTracker())
        self._samples = samples

    def record(
        self, outcome: Outcome, *, batch: Batch | None = None, tokens: Mapping[int, NDArray[np.float32]] | None = None
    ) -> None:
        """Write what happened to groups to the history. Call it before anything else can run. ``batch``: the batch of
        a step;  ``tokens``: the step's logprobs and entropies of its sequences (StepResult)."""
        if outcome.fate == "trained":
            self._history.record_trained(
                outcome.group_ids,
                sequences=outcome.sequences,
                step=outcome.step,
                max_staleness=outcome.max_staleness,
                old_trajectories=outcome.old_trajectories,
                old_tokens=outcome.old_tokens,
            )
        else:
            self._history.record_lost(outcome.fate, outcome.group_ids, step=outcome.step)
        if self._samples is not None:
            self._samples.record(
                outcome,
                incarnation=self._table.incarnation,
                resume_points=self._table.resume_points,
                batch=batch,
                tokens=tokens,
            )

    async def flush(self) -> None:
        """Wait until the history has every line. Consequences of a line are reported only afterwards."""
        while not self._history.is_written:
            await self._disk.write(functools.partial(asyncio.to_thread, self._history.flush), what="the history")

    async def announce(self, outcome: Outcome) -> None:
        """Record an outcome and publish its events."""
        self.record(outcome)
        for data in outcome.events:
            await self.publish_event(outcome.fate, **data)

    async def publish_event(self, kind: str, **data: object) -> None:
        """Publish an event once per incarnation. The event log keeps it for later readers."""
        await self.flush()
        event = Event(kind=kind, actor=LEARNER, time=time.time(), data=data)
        subject = next((data[name] for name in ("group_id", "sequence", "step", "life", "worker") if name in data), "")
        key = f"{LEARNER}/{self._table.incarnation}-{kind}-{_short(str(subject))}"
        await self._bus.publish(EVENTS, event, key=key)

    async def publish_progress(self, *, is_finished: bool = False) -> None:
        """Report how far the run is, which admits prompts into the window."""
        await self.flush()
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
            finished=is_finished,
        )
        await self._bus.put(PROGRESS, reported)

    @property
    def history_position(self) -> int:
        """Number of bytes of the history so far."""
        return self._history.position

    def sync(self) -> None:
        """Sync the history to disk, so that it survives a machine failure. Blocks."""
        self._history.sync()

    def close(self) -> None:
        self._history.close()


def _short(subject: str) -> str:
    """Return the subject as part of a key. Names chosen by others (a life, a worker) are hashed if too long."""
    if length_on_bus(subject) <= LARGEST_KEY:
        return subject
    return hashlib.sha256(subject.encode(errors="replace")).hexdigest()
