"""Which buffered groups train next, which are too old, and when to wait for groups that are still being generated.

No token of a batch is older than max_staleness at the version that trains it
(tests/unit/policies/groups/test_selection.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from asyncrl.config.staleness import TooOld
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness import samplers
from asyncrl.policies.staleness.staleness import is_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection rule of a run.

    order    a name in samplers.ORDERS; with "in_order" a batch waits for every group before its last one
    too_old  when a buffered group is too old: if its oldest token is ("whole"), or only if all of its trajectories
             ("alone") or all of its tokens ("tokens") are
    """

    max_staleness: int
    order: str = "oldest_first"
    too_old: TooOld = "whole"

    def stale(self, table: GroupTable) -> list[BufferedGroup]:
        """Return the buffered groups that are too old for the next step."""
        return [one for one in table.buffered.values() if self.is_stale(one, table.policy_version)]

    def next_batch(self, table: GroupTable, *, count: int) -> list[BufferedGroup] | None:
        """Return the first ``count`` groups by ``order`` (default: oldest version, group id); None if there are fewer.

        Arrival times do not matter. The groups stay buffered until ``GroupTable.take``.
        """
        return self._first(table, count, table.buffered.values())

    def foresee(self, table: GroupTable, *, count: int) -> list[BufferedGroup] | None:
        """Return what ``next_batch`` will return after the batch in training is done and stale groups are dropped."""
        version = table.policy_version + bool(table.training)
        young = [one for one in table.buffered.values() if not self.is_stale(one, version)]
        leaving = {*table.training, *table.buffered} - {one.group_id for one in young}
        return self._first(table, count, young, leaving=leaving)

    def late_starts(self, policy_version: int, oldest_starts: Iterable[int], *, count: int) -> list[int]:
        """Return the starts of groups in generation that would be too old if the next step trained without them.

        The learner waits while there are any. ``oldest_starts`` has the oldest version of each group that has not
        arrived (started_groups.py). A step trains ``count`` groups, oldest first, so the i-th oldest of these groups
        has its turn i // count steps after the next step. Nothing is lost then, because at most (max_staleness + 1) x
        count groups are outstanding (Liu and Layland, 1973: earliest deadline first).
        """
        turn = policy_version + 1
        return [
            start
            for place, start in enumerate(sorted(oldest_starts))
            if turn + place // count - start > self.max_staleness
        ]

    def is_stale(self, one: BufferedGroup, policy_version: int) -> bool:
        """Return whether a buffered group is too old for the step from ``policy_version``."""
        decides = {"whole": one.oldest, "alone": one.youngest, "tokens": one.newest}[self.too_old]
        return is_stale(decides, policy_version=policy_version, max_staleness=self.max_staleness)

    def _first(
        self,
        table: GroupTable,
        count: int,
        candidates: Iterable[BufferedGroup],
        *,
        leaving: Collection[int] = frozenset(),
    ) -> list[BufferedGroup] | None:
        """Choose from ``candidates``; ids in ``leaving`` count as done."""
        keys = [one.key for one in candidates]
        if self.order == "in_order":
            keys = samplers.leading(
                keys,
                is_done=lambda group_id: group_id in table.done or group_id in leaving,
                first=table.done.watermark,
            )
        chosen = samplers.select(keys, count=count, order=samplers.ORDERS[self.order])
        return None if chosen is None else [table.buffered[group_id] for _, group_id in chosen]
