"""Reads the records of the trajectory log and puts them into the group table.

    log -> validator -> table          groups that must not be trained leave again (group_remover.py)

What an earlier incarnation left in the log is read into the table like the rest, but counts towards nothing that ends
the run or quarantines a worker: what made its groups fail may have been mended (test_endings.py).

Tests: tests/actors/test_loop.py, tests/integration/security/test_hostile.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from asyncrl.actors.learner.group_remover import GroupRemover
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.spilled_experts import spill
from asyncrl.actors.learner.validator import CheckResult, Validator
from asyncrl.bus.port import Bus, LogMark, Record
from asyncrl.logs import REASON
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.groups.table import GroupTable

log = logging.getLogger("asyncrl.learner")


class TrajectoryReader:
    """
    changed     set when the table has something new for the batcher
    reconciled  set when the table has every group that was ever published
    experts_in  folder for the experts of groups that wait (spilled_experts.py); None: they stay in memory
    """

    def __init__(
        self,
        bus: Bus,
        *,
        table: GroupTable,
        validator: Validator,
        remover: GroupRemover,
        progress: ProgressReporter,
        changed: asyncio.Event,
        reconciled: asyncio.Event,
        experts_in: Path | None = None,
    ) -> None:
        self._bus = bus
        self._table = table
        self._validator = validator
        self._remover = remover
        self._progress = progress
        self._changed = changed
        self._reconciled = reconciled
        self._experts_in = experts_in
        self._inherited = 0  # sequence of the last record that was stored before this incarnation

    async def start(self) -> None:
        """Check whether the log is the one that the checkpoint knows. If it is another log, or was reset, the cursor is
        meaningless: the log is read from its start, and the table knows which of its groups are done."""
        if self._experts_in is not None:
            self._experts_in.mkdir(parents=True, exist_ok=True)
        sequence, stored = self._table.last_read
        mark = LogMark(log=self._table.log, sequence=sequence, stored=stored)
        found = await self._bus.log_state(TRAJECTORIES, mark=mark)
        if found.problem:
            log.warning(
                "the bus lost what it had of the trajectory log: %s; reading it again from entry %d; groups "
                "trained before are not trained again",
                found.problem,
                found.first,
            )
            self._table.start_new_log(first=found.first)
        self._table.follow_log(found.identity)
        self._inherited = await self._bus.last_sequence(TRAJECTORIES)

    async def read(self) -> None:
        """consumes: trajectories    waits for: the prompt source's reconciliation with the bus, then records"""
        await self._reconciled.wait()
        async with self._bus.read(TRAJECTORIES, after=self._table.cursor) as records:
            async for record in records:
                await self._add(record if self._experts_in is None else await self._spill(record, self._experts_in))

    async def _spill(self, record: Record[TrajectoryGroup], folder: Path) -> Record[TrajectoryGroup]:
        """Return the record with the group's experts on disk; in memory, with a warning, if they cannot be written."""
        if record.message is None:
            return record
        try:
            return replace(record, message=await asyncio.to_thread(spill, record.message, folder))
        except OSError as error:
            log.warning("learner.experts_directory: %s; experts of this group stay in memory", error)
            return record

    async def _add(self, record: Record[TrajectoryGroup]) -> None:
        """Put a record into the table, and carry out what follows from it."""
        checked = await self._check(record)
        group = checked.group
        arrival = self._table.arrive(
            record.sequence, group, now=time.monotonic(), is_counted=checked.is_counted, stored=record.stored
        )
        self._changed.set()
        if arrival.became == "buffered" and group is not None:
            await self._remover.remove_unwanted(group, checked)  # removes before anything else can run
            await self._report_cancelled(group)
        elif arrival.outcome is not None and group is not None:
            await self._report_failed(group, arrival.outcome, checked, is_inherited=self._is_inherited(record))
        elif arrival.became == "rejected" and checked.is_news:
            await self._progress.publish_event("rejected", sequence=record.sequence, problem=checked.problem)

    async def _check(self, record: Record[TrajectoryGroup]) -> CheckResult:
        if gone := self._table.skip(record.sequence):
            log.warning("entries %d to %d of the trajectory log are gone, and were never read", gone[0], gone[-1])
        await self._validator.notice_restart(record)
        image_problem = await self._validator.find_image_problem(record, self._table)
        is_inherited = self._is_inherited(record)
        if not is_inherited and self._inherited:
            self._table.begin_anew()
            self._inherited = 0
        return self._validator.check(record, self._table, is_inherited=is_inherited, image_problem=image_problem)

    def _is_inherited(self, record: Record[TrajectoryGroup]) -> bool:
        """Return whether an earlier incarnation left the record in the log."""
        return record.sequence <= self._inherited

    async def _report_cancelled(self, group: TrajectoryGroup) -> None:
        """Report samples that were cut off or have failed, if there are any."""
        if group.cancelled:
            await self._progress.publish_event(
                "cancelled",
                group_id=group.group_id,
                worker=group.worker,
                cancelled=group.cancelled,
                failed_samples=group.failed_samples,
            )

    async def _report_failed(
        self, group: TrajectoryGroup, outcome: Outcome, checked: CheckResult, *, is_inherited: bool
    ) -> None:
        if not checked.problem:  # else the validator has logged it
            on = f" on {group.worker}" if group.worker else ""
            level = logging.INFO if is_inherited else logging.WARNING  # it was said then
            log.log(level, "group %d failed%s: %s", group.group_id, on, group.error, extra={REASON: group.error})
        await self._remover.announce_failed(
            outcome, worker=group.worker, error=group.error, is_counted=checked.is_counted, is_inherited=is_inherited
        )
