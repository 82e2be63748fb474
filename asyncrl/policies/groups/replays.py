"""Trained groups that a later step trains again while they are fresh enough (staleness.replay_groups).

Only groups with something to learn from (``has_spread``) are replayed, highest mean reward first; ties go to the
youngest id. Replayed groups take no place in the batch or the window: a step trains them in addition. Checkpoints do
not contain the pool, so a resumed learner begins with an empty one. Tests: tests/unit/policies/groups/test_replays.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from asyncrl.policies.batching.filters import has_spread
from asyncrl.policies.groups.states import BufferedGroup

IsStale = Callable[[BufferedGroup], bool]


@dataclass(slots=True, kw_only=True)
class Replays:
    """The pool of trained groups, and the choice of those that a step trains again.

    per_step  groups that a step trains again
    times     how often each group is trained again, at most
    pool      groups that were trained
    counts    how often each group was trained again
    training  replayed groups of the batch in training
    """

    per_step: int = 0
    times: int = 1
    pool: dict[int, BufferedGroup] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    training: dict[int, BufferedGroup] = field(default_factory=dict)

    def take(self, *, is_stale: IsStale) -> list[BufferedGroup]:
        """Return the groups that the step now beginning trains again."""
        if not self.per_step:
            return []
        for group_id in [group_id for group_id, one in self.pool.items() if is_stale(one)]:
            self._forget(group_id)
        chosen = self._first(self.pool.values())
        self.training = {one.group_id: one for one in chosen}
        return chosen

    def foresee(self, trained: Iterable[BufferedGroup], *, is_stale: IsStale) -> list[BufferedGroup]:
        """Return what ``take`` will return after the batch in training, which contains ``trained``, is done."""
        if not self.per_step:
            return []
        left = [one for group_id, one in self.pool.items() if not self._is_last(group_id)]
        return self._first(one for one in (*left, *filter(_is_good, trained)) if not is_stale(one))

    def done(self, trained: Iterable[BufferedGroup]) -> tuple[BufferedGroup, ...]:
        """Finish the step, whose new groups were ``trained``; return the groups that it trained again."""
        replayed = tuple(self.training.values())
        for group_id in [group_id for group_id in self.training if self._is_last(group_id)]:
            self._forget(group_id)
        for group_id in self.training.keys() & self.pool.keys():
            self.counts[group_id] = self.counts.get(group_id, 0) + 1
        self.training = {}
        if self.per_step:
            self.pool |= {one.group_id: one for one in trained if _is_good(one)}
        return replayed

    def discard(self) -> None:
        """The batch is not trained: for whatever reason, its replayed groups are not replayed again."""
        for group_id in self.training:
            self._forget(group_id)
        self.training = {}

    def clear(self) -> None:
        """Forget all groups: the log was replaced, so the records of replayed groups could not be found in it."""
        self.pool, self.counts = {}, {}

    def _first(self, candidates: Iterable[BufferedGroup]) -> list[BufferedGroup]:
        return sorted(candidates, key=lambda one: (-float(np.mean(one.group.rewards)), -one.group_id))[: self.per_step]

    def _is_last(self, group_id: int) -> bool:
        """Return whether the step in training is the last one that may replay the group."""
        return group_id in self.training and self.counts.get(group_id, 0) + 1 >= self.times

    def _forget(self, group_id: int) -> None:
        self.pool.pop(group_id, None)
        self.counts.pop(group_id, None)


def _is_good(one: BufferedGroup) -> bool:
    return has_spread(one.group.rewards)
