"""Takes groups out of the window that must not be trained: failed, filtered, or of a quarantined worker.

Each removal is an event of the group table, whose outcome is recorded, announced, and reported as progress, so that
other groups are generated in their place.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Final

from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.validator import CheckResult, Validator
from asyncrl.errors import HopelessError
from asyncrl.logs import REASON
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.groups.table import GroupTable

MOST_ALIKE: Final = 8
"""Groups that may fail for the same reason before any is made: a bug in the user's program, not bad luck."""
MOST_FAILED_OF_WORKER: Final = 16
"""A worker whose groups all fail, this many in a row, is broken if nearly all groups of the others can be trained."""
OTHERS_FINE: Final = 4.0
"""Groups of others that can be trained, for each that fails."""

log = logging.getLogger("asyncrl.learner")


class GroupRemover:
    """``changed`` is set when groups have left the window; ``max_failed_in_a_row``, or MOST_ALIKE, ends the run."""

    def __init__(
        self,
        *,
        table: GroupTable,
        progress: ProgressReporter,
        validator: Validator,
        changed: asyncio.Event,
        max_failed_in_a_row: int,
    ) -> None:
        self._table = table
        self._progress = progress
        self._validator = validator
        self._changed = changed
        self._max_failed_in_a_row = max_failed_in_a_row
        self._failed_of: set[str] = set()  # workers with failed groups since a group was buffered
        self._first_reasons: set[str] | None = set()  # None once a group was buffered
        self._num_buffered = self._num_failed = 0
        self._rows: dict[str, tuple[int, int, int]] = {}
        """worker -> its failed groups in a row; groups buffered and failed, of all workers, before they began"""

    async def fail(self, problems: Mapping[int, str], *, is_of_workers: bool = True) -> None:
        """Fail buffered groups. ``problems``: group id -> why. Groups that have left the buffer are skipped.

        is_of_workers  each is to be blamed on its worker; False if it was said already what is to blame
        """
        for group_id, problem in problems.items():
            if (one := self._table.buffered.get(group_id)) is None:
                continue  # its worker was quarantined while another group was announced
            error = problem[:LONGEST_ERROR]
            if is_of_workers:
                log.error("group %d of worker %s is not trained: %s", group_id, one.group.worker or "?", error)
            await self._lose(self._table.fail_buffered(group_id, error=error))
        self._changed.set()

    async def quarantine(self, worker: str, reason: str) -> None:
        """Train nothing more of this worker, and announce the quarantine. Raises HopelessError for the last worker."""
        log.error("worker %s is quarantined: %s; its groups are not trained", worker, reason)
        self._rows.pop(worker, None)  # a new life is judged afresh
        try:
            await self._validator.quarantine(worker, reason, incarnation=self._table.incarnation)
        finally:  # also for the last worker, whose quarantine ends the run
            life = self._validator.lives.get(worker, "")
            await self._progress.publish_event("quarantined", worker=worker, reason=reason, life=life)
        await self.drop_quarantined()

    async def drop_quarantined(self) -> None:
        """Drop buffered groups of quarantined workers; a batch in training is not touched."""
        groups = [one for one in self._table.buffered.values() if one.group.worker in self._validator.quarantined]
        if groups:
            await self._lose(self._table.drop(groups, reason="quarantined"))
            self._changed.set()

    async def remove_unwanted(self, group: TrajectoryGroup, checked: CheckResult) -> None:
        """Remove a group that was buffered just now if its filters, or its worker's quarantine, say so.

        The table changes before the first await: otherwise the batcher could take the group into a batch.
        """
        self._failed_of.clear()
        self._first_reasons = None
        self._num_buffered += 1
        self._rows.pop(group.worker, None)
        if group.worker in self._validator.quarantined:
            await self.drop_quarantined()
        elif checked.filtered_by:
            await self._lose(self._table.filter(group.group_id, by=checked.filtered_by))
        elif checked.filter_error:
            error = checked.filter_error[:LONGEST_ERROR]
            log.warning("group %d failed: %s", group.group_id, error, extra={REASON: error})
            await self._lose(self._table.fail_buffered(group.group_id, error=error))

    async def announce_failed(
        self, outcome: Outcome, *, worker: str, error: str, is_counted: bool, is_inherited: bool
    ) -> None:
        """Announce a group that arrived as failed. Raises HopelessError after too many failed groups in a row.

        If they all come from some of the workers, those are quarantined instead and the others go on. So is a worker
        whose groups all fail while those of the others do not: it would fail one group after the other at once, and
        might say of each that others sampled what is wrong in it (``resumed``).

        is_inherited  an earlier incarnation saw it
        """
        await self._progress.announce(outcome)
        if is_counted:
            self._failed_of.add(worker)
            in_a_row = self._table.failed_in_a_row
            text = f"the last {in_a_row} groups were all failed; the newest because: {error}"
            is_alike = self._is_same_from_the_start(error) and in_a_row >= MOST_ALIKE
            if is_alike and not await self._validator.other_workers(self._failed_of):
                raise HopelessError(text)
            if in_a_row >= self._max_failed_in_a_row:
                is_of_nobody = "" in self._failed_of  # as prompts that end every worker
                if (
                    is_of_nobody
                    or not self._validator.is_on
                    or not await self._validator.other_workers(self._failed_of)
                ):
                    raise HopelessError(text)
                for name in sorted(self._failed_of - self._validator.quarantined.keys()):
                    await self.quarantine(name, text)
                self._failed_of.clear()
                self._table.excuse_failures()
        if not is_inherited and self._is_broken(worker) and await self._validator.other_workers({worker}):
            its = f"its last {MOST_FAILED_OF_WORKER} groups all failed, and those of the other workers do not"
            await self.quarantine(worker, f"{its}; the newest because: {error}")
        if reason := self._validator.why_quarantine(worker):
            await self.quarantine(worker, reason)
        await self._progress.publish_progress()

    def _is_same_from_the_start(self, error: str) -> bool:
        """Note why a group failed. Return whether no group was made yet, and all failed for this reason."""
        if self._first_reasons is None:
            return False
        self._first_reasons.add(re.sub(r"\d+", "0", error))  # ids, ports and lines differ
        return len(self._first_reasons) == 1

    def _is_broken(self, worker: str) -> bool:
        """Count a failed group of a worker. Return whether it fails all its groups, and the others do not."""
        if not worker or worker in self._validator.quarantined or not self._validator.is_on:
            return False
        count, buffered, failed = self._rows.get(worker, (0, self._num_buffered, self._num_failed))
        self._rows[worker] = count + 1, buffered, failed
        self._num_failed += 1
        others_buffered, others_failed = self._num_buffered - buffered, self._num_failed - failed - count - 1
        return count + 1 >= MOST_FAILED_OF_WORKER and others_buffered > OTHERS_FINE * others_failed

    async def _lose(self, outcome: Outcome) -> None:
        await self._progress.announce(outcome)
        await self._progress.publish_progress()
