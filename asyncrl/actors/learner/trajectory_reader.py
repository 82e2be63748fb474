"""Reads the records of the trajectory log and puts them into the group table.

    log -> validator -> buffered -> filters            groups leave as failed, filtered, or dropped (quarantined)

Tests: tests/actors/test_loop.py, tests/integration/security/test_hostile.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.actors.learner.group_filters import GroupFilters
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.validator import Checked, Rescore, Validator, Verdict
from asyncrl.bus.port import Bus, LogMark, Record
from asyncrl.errors import FilterError, HopelessError
from asyncrl.logs import REASON
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.rollout import LONGEST_ERROR, failed_group
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.batching.packing import Document
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.metric import Metric
from asyncrl.policies.trust.tickets import Tickets

log = logging.getLogger("asyncrl.learner")


class TrajectoryReader:
    """``changed`` is set when the table has something new for the batcher; ``max_failed_in_a_row`` ends the run."""

    def __init__(
        self,
        bus: Bus,
        *,
        table: GroupTable,
        progress: ProgressReporter,
        changed: asyncio.Event,
        reconciled: asyncio.Event,
        validator: Validator,
        filters: GroupFilters | None,
        max_failed_in_a_row: int,
        tickets: Tickets | None = None,
    ) -> None:
        """reconciled: set when the table has every group that was ever published;  tickets: None for none"""
        self._bus = bus
        self._table = table
        self._progress = progress
        self._changed = changed
        self._validator = validator
        self._filters = filters
        self._max_failed_in_a_row = max_failed_in_a_row
        self._reconciled = reconciled
        self._tickets = tickets or Tickets()
        self._failed_of: set[str] = set()  # workers with failed groups since a group was buffered
        self._explained = ""
        """The last error of a filter; its traceback is in the log already."""

    async def start(self) -> None:
        """Prepare to read."""
        await self._find_log()
        await self._validator.start()

    async def read(self) -> None:
        """consumes: trajectories    waits for: the prompt source's reconciliation with the bus, then records"""
        await self._reconciled.wait()
        async with self._bus.read(TRAJECTORIES, after=self._table.cursor) as records:
            async for record in records:
                await self._add(record)

    async def _find_log(self) -> None:
        """Check whether the log is the one that the checkpoint knows. If it is another log, or was reset, the cursor is
        meaningless: the log is read from its start, and the table knows which of its groups are done."""
        sequence, stored = self._table.last_read
        mark = LogMark(log=self._table.log, sequence=sequence, stored=stored)
        found = await self._bus.log_state(TRAJECTORIES, mark=mark)
        if found.problem:
            log.warning(
                "the bus lost what it had of the trajectory log: %s; reading it again from entry %d; groups "
                "trained before are not trained again",
                *(found.problem, found.first),
            )
            self._table.start_new_log(first=found.first)
        self._table.follow_log(found.identity)

    async def reject_batch(
        self, groups: Sequence[TrajectoryGroup], documents: Sequence[Document], rescore: Rescore
    ) -> bool:
        """Return whether the batch in training contains answers of a worker that is not, or no longer, trusted, or
        answers with taken-over tokens that are not the policy's.

        If so, the batch is put back, that worker's groups are dropped, and the groups of such answers are failed.
        ``rescore``: asks the trainer for its own logprobs of the given documents.
        """
        verdict = Verdict(guilty={}, spoiled={})
        if (doubts := self._validator.doubts(documents, groups, step=self._table.step)) is not None:
            verdict = await rescore(functools.partial(self._validator.judge, doubts, documents))
        is_distrusted = any(group.worker in self._validator.quarantined for group in groups)
        if not verdict.guilty and not verdict.spoiled and not is_distrusted:
            return False
        self._table.put_back()
        for worker, reason in verdict.guilty.items():
            await self.quarantine(worker, reason)
        await self.drop_quarantined()
        group_ids = [group.group_id for group in groups for _ in group.trajectories]
        await self.reject({group_ids[index]: problem for index, problem in verdict.spoiled.items()}, because="")
        return True

    async def reject(self, problems: Mapping[int, str], *, because: str = "a training step with it fails: ") -> None:
        """Fail buffered groups that must not be trained. ``problems``: group id -> why."""
        for group_id, problem in problems.items():
            if (one := self._table.buffered.get(group_id)) is None:
                continue  # its worker was quarantined while another group was reported
            worker = one.group.worker
            error = f"{because}{problem}"[:LONGEST_ERROR]
            log.error("group %d of worker %s is not trained: %s", group_id, worker or "?", error)
            await self._lost(self._table.reject(group_id, error=error))
        self._changed.set()

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of the workers' answers."""
        mismatch = {f"mismatch/{worker}/mean": mean for worker, mean in self._validator.mismatch.items()}
        kept = float(self._filters.num_kept_at_cap) if self._filters is not None else 0.0
        return {
            **mismatch,
            **self._validator.routing,
            "rollout/quarantined": float(len(self._validator.quarantined)),
            "staleness/kept_at_cap": kept,
        }

    async def quarantine(self, worker: str, reason: str) -> None:
        """Train nothing more of this worker, and announce the quarantine."""
        log.error("worker %s is quarantined: %s; its groups are not trained", worker, reason)
        try:
            await self._validator.quarantine(worker, reason, incarnation=self._table.incarnation)
        finally:  # also for the last worker, whose quarantine ends the run
            life = self._validator.lives.get(worker, "")
            await self._progress.event("quarantined", worker=worker, reason=reason, life=life)
        await self.drop_quarantined()

    async def drop_quarantined(self) -> None:
        """Drop buffered groups of quarantined workers; a batch in training is not touched."""
        groups = [one for one in self._table.buffered.values() if one.group.worker in self._validator.quarantined]
        if groups:
            await self._lost(self._table.drop(groups, reason="quarantined"))
            self._changed.set()

    async def _add(self, record: Record[TrajectoryGroup]) -> None:
        if gone := self._table.skip(record.sequence):
            log.warning("entries %d to %d of the trajectory log are gone, and were never read", gone[0], gone[-1])
        sender = record.message.worker if record.message is not None else ""
        if sender in self._validator.quarantined and await self._validator.is_another_life(sender):
            log.warning("worker %s was restarted: its quarantine ends", sender)
        checked = self._check(record)
        group = checked.group
        # An impossible group does not show that the run cannot make groups: it counts only against its sender.
        is_counted = not (checked.problem and self._validator.is_on)
        arrival = self._table.arrive(
            record.sequence, group, now=time.monotonic(), is_counted=is_counted, stored=record.stored
        )
        self._changed.set()
        if arrival.became == "rejected":
            if checked.is_news:
                await self._progress.event("rejected", sequence=record.sequence, problem=checked.problem)
        elif arrival.outcome is not None and group is not None:
            if not checked.problem:  # else the validator has logged it
                worker, error = group.worker or "?", group.error
                log.warning("group %d failed on %s: %s", group.group_id, worker, error, extra={REASON: error})
            await self._failed(arrival.outcome, worker=group.worker, error=group.error)
        elif arrival.became == "buffered" and group is not None:
            await self._buffered(group)

    def _check(self, record: Record[TrajectoryGroup]) -> Checked:
        """Return what to do with a record. For a group that is not outstanding, only the key is used, so no worker is
        judged by records that are read again."""
        table, group_id = self._table, self._tickets.group_answered(record.key)
        if group_id is not None and table.is_published(group_id) and not table.awaits(record.sequence, group_id):
            return Checked(group=failed_group(group_id, worker="", error="it arrived before"))
        return self._validator.check(
            record,
            is_published=table.is_published,
            incarnation=table.incarnation,
            policy_version=table.policy_version,
            forks=table.forks,
            asked=table.asked,
            group_answered=self._tickets.group_answered,
        )

    async def _buffered(self, group: TrajectoryGroup) -> None:
        self._failed_of.clear()
        # Nothing may be awaited before the filters: the batcher could take the group into a batch.
        if group.worker in self._validator.quarantined:
            await self.drop_quarantined()
        elif self._filters is not None:
            await self._filtered(group, self._filters)
        if group.cancelled:
            await self._progress.event(
                "cancelled",
                group_id=group.group_id,
                worker=group.worker,
                cancelled=group.cancelled,
                failed_samples=group.failed_samples,
            )

    async def _filtered(self, group: TrajectoryGroup, filters: GroupFilters) -> None:
        """Apply filters. A group that is rejected, or that a filter raises on, is replaced by a new group."""
        try:
            if not filters.keep(group, since_step=self._table.lost_since_step("filtered")):
                await self._lost(self._table.filter(group.group_id, by=filters.rejected_by))
        except FilterError as error:
            text = str(error)[:LONGEST_ERROR]
            log.warning("group %d failed: %s", group.group_id, text, extra={REASON: text})
            if text != self._explained:
                self._explained = text
                log.info("where it was raised:", exc_info=error.__cause__)
            await self._lost(self._table.reject(group.group_id, error=text))

    async def _failed(self, outcome: Outcome, *, worker: str, error: str) -> None:
        """Announce a failed group. Raises HopelessError after too many failed groups in a row."""
        await self._progress.announce(outcome)
        self._failed_of.add(worker)
        in_a_row = self._table.failed_in_a_row
        if in_a_row >= self._max_failed_in_a_row:
            text = f"the last {in_a_row} groups were all failed; the newest because: {error}"
            if not self._validator.is_on or not await self._validator.others(self._failed_of):
                raise HopelessError(text)
            for name in sorted(self._failed_of - {"", *self._validator.quarantined}):
                await self.quarantine(name, text)
            self._failed_of.clear()
            self._table.excuse_failures()
        if reason := self._validator.too_often(worker):
            await self.quarantine(worker, reason)
        await self._progress.progress()

    async def _lost(self, outcome: Outcome) -> None:
        await self._progress.announce(outcome)
        await self._progress.progress()
