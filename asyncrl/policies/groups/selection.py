"""Which buffered groups train next, which are too old, and when to wait for groups that are still being generated.

No token of a batch is older than max_staleness at the version that trains it
(tests/unit/policies/groups/test_selection.py). The order depends on (oldest version, group id) only. Arrival times are
not an input, so they do not change what is trained when. Ids are assigned in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.config import plugins
from asyncrl.config.staleness import Discard
from asyncrl.errors import HopelessError
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.staleness import is_stale

Key = tuple[int, int]
Order = Callable[[Key], Key]
"""A sort key: groups with the lowest key go first."""


def oldest_first(key: Key) -> Key:
    """By version, then id, so that no group waits until it is too old. The default; NeMo-RL's weight FIFO, ungated."""
    return key


def freshest_first(key: Key) -> Key:
    """Newest version first, then by id: lowest staleness now, but old groups go stale in the buffer.

    This is NeMo-RL's windowed sampler with freshest first. Long answers are always old, so they are the ones dropped:
    compare length/dropped with length/trained.
    """
    version, group_id = key
    return (-version, group_id)


def in_order(key: Key) -> Key:
    """By id, which is the order of the prompts. With ``leading``, a batch waits for all groups in between."""
    version, group_id = key
    return (group_id, version)


Rank = Callable[[TrajectoryGroup, int], Any]
"""A sort key of the user's own, of a group and the version of its oldest token."""


def own_order(name: str) -> Rank | None:
    """Load "package.module:function" of staleness.order; None for a name in ORDERS. Raises ConfigError."""
    if name in ORDERS:
        return None
    table = {one: f"{__name__}:{one}" for one in ORDERS}
    found: Rank = plugins.load(name, where="staleness.order", table=table)
    plugins.check_call(found, ("group", "version"), wanted=f"staleness.order: {name!r} must take (group, version)")
    return found


ORDERS: Final[dict[str, Order]] = {"oldest_first": oldest_first, "freshest_first": freshest_first, "in_order": in_order}


def _ranked(candidates: Iterable[BufferedGroup], rank: Rank, name: str) -> list[BufferedGroup]:
    """Sort by the user's key, then oldest first. Raises HopelessError if the user's function raises."""
    try:
        with plugins.contain_exits():
            return sorted(candidates, key=lambda one: (rank(one.group, one.oldest_version), one.key))
    except Exception as error:  # user code may raise anything, also when keys are compared
        raise HopelessError(f"staleness.order: {name} raised {plugins.describe_raised(error)}") from error


def select(keys: Collection[Key], *, count: int, order: Order = oldest_first) -> list[Key] | None:
    """Return the first ``count`` groups; None if there are fewer, since a batch is never partial."""
    return sorted(keys, key=order)[:count] if len(keys) >= count else None


def leading(keys: Iterable[Key], *, is_done: Callable[[int], bool], first: int = 0) -> list[Key]:
    """Return the groups with no gap before them: from id ``first`` up to the first that is neither here nor done.

    ``select`` from these with ``in_order`` is NeMo-RL's in-order sampler. One straggler holds up all later groups.
    """
    # Example: first 4, here 4, 6, 7, and 5 is done: all three. Where 5 is neither here nor done: only 4.
    by_id = {group_id: (version, group_id) for version, group_id in keys if group_id >= first}
    result: list[Key] = []
    group_id = first
    while group_id in by_id or (is_done(group_id) and len(result) < len(by_id)):
        if group_id in by_id:
            result.append(by_id[group_id])
        group_id += 1
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection rule of a run.

    order    a name in ORDERS; with "in_order" a batch waits for every group before its last one
    rank     instead of ``order``, if the user has an order; ties are oldest first
    discard  when a buffered group is too old: if its oldest token is ("groups"), or only if all of its trajectories
             ("trajectories") or all of its tokens ("tokens") are
    """

    max_staleness: int
    order: str = "oldest_first"
    rank: Rank | None = None
    discard: Discard = "groups"

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
        # The step in training will make the next version. Groups that are too old for it count as done, so that
        # "in_order" does not wait for them.
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
        # Example: bound 4, count 2, policy version 10, starts 6, 6, 8. Unless the next step waits for the first two,
        # the one after it trains them, from version 11, when they are 5 versions old: too late, so we return both.
        # The third comes one step later, from version 12, when it is 4 old: in time.
        turn = policy_version + 1
        return [
            start
            for place, start in enumerate(sorted(oldest_starts))
            if turn + place // count - start > self.max_staleness
        ]

    def is_stale(self, one: BufferedGroup, policy_version: int) -> bool:
        """Return whether a buffered group is too old for the step from ``policy_version``."""
        version = {
            "groups": one.oldest_version,
            "trajectories": one.newest_trajectory_version,
            "tokens": one.newest_version,
        }[self.discard]
        return is_stale(version, policy_version=policy_version, max_staleness=self.max_staleness)

    def _first(
        self,
        table: GroupTable,
        count: int,
        candidates: Iterable[BufferedGroup],
        *,
        leaving: Collection[int] = frozenset(),
    ) -> list[BufferedGroup] | None:
        """Choose from ``candidates``; ids in ``leaving`` count as done."""
        if self.rank is not None:
            candidates = list(candidates)
            return _ranked(candidates, self.rank, self.order)[:count] if len(candidates) >= count else None
        keys = [one.key for one in candidates]
        if self.order == "in_order":
            keys = leading(
                keys,
                is_done=lambda group_id: group_id in table.done or group_id in leaving,
                first=table.done.watermark,
            )
        chosen = select(keys, count=count, order=ORDERS[self.order])
        return None if chosen is None else [table.buffered[group_id] for _, group_id in chosen]
