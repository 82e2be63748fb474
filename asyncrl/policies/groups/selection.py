"""Which buffered groups train next, which are too old to, and when to hold for those that are still being generated.

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
    """The rule of one run. order: a name of samplers.ORDERS; with "in_order" a batch waits for every group before its
    last. too_old: a group goes with its oldest token ("whole"), or once each trajectory ("alone") or token ("tokens")
    of it is too old."""

    max_staleness: int
    order: str = "oldest_first"
    too_old: TooOld = "whole"

    def stale(self, table: GroupTable) -> list[BufferedGroup]:
        """Buffered groups that are too old for the next step."""
        return [one for one in table.buffered.values() if self.is_stale(one, table.policy_version)]

    def next_batch(self, table: GroupTable, *, count: int) -> list[BufferedGroup] | None:
        """The first ``count`` groups by (oldest version, group id), or by ``order``; None when there are fewer.

        Arrival times do not matter. The groups stay buffered until ``GroupTable.take``.
        """
        return self._first(table, count, table.buffered.values())

    def foresee(self, table: GroupTable, *, count: int) -> list[BufferedGroup] | None:
        """What ``next_batch`` will give once the batch in training is done and what is stale then was dropped."""
        version = table.policy_version + bool(table.training)
        young = [one for one in table.buffered.values() if not self.is_stale(one, version)]
        leaving = {*table.training, *table.buffered} - {one.group_id for one in young}
        return self._first(table, count, young, leaving=leaving)

    def late_starts(self, policy_version: int, oldest_starts: Iterable[int], *, count: int) -> list[int]:
        """Where the learner waits: the groups that are still being generated, and that the next step would leave behind
        as too old, by their starts; it holds while there are any.

        ``oldest_starts``: of each group that has not arrived, the oldest version in it (begun.py). Steps train
        ``count`` groups, the oldest first: of these groups the i-th oldest has its turn i // count steps after the
        next one. Nothing is lost then: no more than (max_staleness + 1) x count are outstanding (Liu and Layland,
        1973: earliest deadline first).
        """
        turn = policy_version + 1
        return [
            start
            for place, start in enumerate(sorted(oldest_starts))
            if turn + place // count - start > self.max_staleness
        ]

    def is_stale(self, one: BufferedGroup, policy_version: int) -> bool:
        """Whether a buffered group is too old for the step from ``policy_version``."""
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
        """Of ``candidates``; ids in ``leaving`` count as done."""
        keys = [one.key for one in candidates]
        if self.order == "in_order":
            keys = samplers.leading(
                keys,
                is_done=lambda group_id: group_id in table.done or group_id in leaving,
                first=table.done.watermark,
            )
        chosen = samplers.select(keys, count=count, order=samplers.ORDERS[self.order])
        return None if chosen is None else [table.buffered[group_id] for _, group_id in chosen]
