"""Trajectory groups in, batches out: once each, oldest first (or in another order of samplers.py), none too stale.

Invariants (tests/test_policies.py):
  B1 a group id is trained, dropped or buried once, whatever the bus delivers twice.
  B2 no token of a batch is older than max_staleness at the version that trains it.
  B3 every record added is disposed of once: its sequence ends in ``consumed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.messages import TrajectoryGroup
from asyncrl.policies import samplers
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.staleness import Forks, is_stale, oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A group waiting to be trained. ``oldest`` is the effective version of its oldest token."""

    sequence: int
    group: TrajectoryGroup
    oldest: int
    num_tokens: int
    arrived: float

    @property
    def key(self) -> samplers.Key:
        return (self.oldest, self.group.group_id)


@dataclass(slots=True, kw_only=True)
class Buffer:
    """State of what was read from the trajectory log.

    groups    ids disposed of for good          consumed  log sequences disposed of for good
    order     a name of samplers.ORDERS; with "in_order" a batch waits for every group before its last
    """

    max_staleness: int
    order: str = "oldest_first"
    forks: Forks = field(default_factory=dict)
    groups: Ledger = field(default_factory=Ledger)
    consumed: Ledger = field(default_factory=lambda: Ledger(watermark=1))  # sequences count from 1
    held: dict[int, Held] = field(default_factory=dict)

    def add(self, sequence: int, group: TrajectoryGroup | None, *, now: float) -> str:
        """What became of a record: "held", "buried" (it carries an error), "duplicate", or "refused" (no message)."""
        if sequence in self.consumed:
            return "duplicate"
        if group is None:
            self.consumed.add(sequence)
            return "refused"
        if group.group_id in self.groups or group.group_id in self.held:
            self.consumed.add(sequence)
            return "duplicate"
        if group.error:
            self._dispose(sequence, group.group_id)
            return "buried"
        self.held[group.group_id] = Held(
            sequence=sequence,
            group=group,
            oldest=min(oldest_version(t.version_spans, self.forks) for t in group.trajectories),
            num_tokens=sum(len(t.tokens) for t in group.trajectories),
            arrived=now,
        )
        return "held"

    def evict(self, policy_version: int) -> list[Held]:
        """Remove what is too old to be trained by the step that starts from ``policy_version``."""
        stale = [held for held in self.held.values() if self._is_stale(held, policy_version)]
        for held in stale:
            self.dispose(held)
        return stale

    def take(self, count: int) -> list[Held] | None:
        """The first ``count`` groups by (oldest version, group id), or by ``order``: it does not depend on arrival.

        They stay held until ``dispose``: a failed step loses nothing. None when there are fewer.
        """
        return self._first(count, self.held.values())

    def foresee(self, count: int, *, policy_version: int, training: Sequence[Held]) -> list[Held] | None:
        """What ``take`` would give at ``policy_version``, behind ``evict``, once ``training`` is disposed of."""
        busy = {held.group.group_id for held in training}
        left = [held for group_id, held in self.held.items() if group_id not in busy]
        young = [held for held in left if not self._is_stale(held, policy_version)]
        return self._first(count, young, passed=set(self.held) - {held.group.group_id for held in young})

    def dispose(self, held: Held) -> None:
        """The group is trained or dropped: it and its record are done with for good."""
        del self.held[held.group.group_id]
        self._dispose(held.sequence, held.group.group_id)

    def must_wait(self, policy_version: int, oldest_starts: Iterable[int], *, count: int) -> bool:
        """With eviction "wait": would the next step leave behind a group that is still being generated and cannot be
        trained in time any more?

        ``oldest_starts``: of each group that has not arrived, the oldest version that may sample it. Steps train
        ``count`` groups, the oldest first: of these groups the i-th oldest has its turn i // count steps behind the
        next one. Nothing is lost then, so long as a group is begun at the version that admits it: no more than
        (max_staleness + 1) x count are outstanding (Liu and Layland, 1973: the earliest deadline first).
        """
        turn = policy_version + 1
        return any(
            turn + place // count - start > self.max_staleness for place, start in enumerate(sorted(oldest_starts))
        )

    @property
    def num_tokens(self) -> int:
        return sum(held.num_tokens for held in self.held.values())

    def _is_stale(self, held: Held, policy_version: int) -> bool:
        return is_stale(held.oldest, policy_version=policy_version, max_staleness=self.max_staleness)

    def _first(
        self, count: int, candidates: Iterable[Held], *, passed: Collection[int] = frozenset()
    ) -> list[Held] | None:
        """Of ``candidates``; ids in ``passed`` count as done."""
        keys = [held.key for held in candidates]
        if self.order == "in_order":
            keys = samplers.leading(
                keys,
                is_done=lambda group_id: group_id in self.groups or group_id in passed,
                first=self.groups.watermark,
            )
        chosen = samplers.select(keys, count=count, order=samplers.ORDERS[self.order])
        return None if chosen is None else [self.held[group_id] for _, group_id in chosen]

    def _dispose(self, sequence: int, group_id: int) -> None:
        self.consumed.add(sequence)
        self.groups.add(group_id)
