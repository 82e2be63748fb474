"""Sends a group off without its stragglers: at the last step that may train it, the members that are done go alone.

Only the worker knows how far each member is, and the learner's progress says how old it would be. The learner takes the
batch of version v + 1 the moment the step from v ends, and the group must be in the log by then; so the rule of
samplers.group_action is asked about that next batch. A group whose oldest token is of version v goes, with at least
``min_group`` members, from the moment the learner is at v + max_staleness - 1. While fewer are done it waits for them,
also beyond the bound: a group that will be dropped should not hold engines for its last member.

The members cut off are the longest. Their number travels with the group: an event each, staleness/cancelled each step.
Tests: tests/test_stragglers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.policies.samplers import group_action


class Stragglers:
    """The rule for all groups of one worker."""

    def __init__(self, *, max_staleness: int, min_group: int, are_waited_for: bool = False) -> None:
        """are_waited_for: the learner holds for groups in time (eviction "wait"). It counts from the version that a
        group was asked at, and the worker must as well: else each waits for the other."""
        self._max_staleness = max_staleness
        self._min_group = min_group
        self._are_waited_for = are_waited_for
        self._policy_version = 0
        self._waiting: set[asyncio.Event] = set()

    def learner_is_at(self, policy_version: int) -> None:
        self._policy_version = policy_version
        for changed in self._waiting:
            changed.set()

    async def cut(self, members: Sequence[asyncio.Task[Any]], starts: Mapping[int, int], *, asked_at: int = 0) -> None:
        """Cancel the members that are not done once the others must go; returns when all are done or cancelled.

        starts: member -> policy version that its first token was asked of; a member that waits for weights has none
        asked_at: oldest version that the learner takes the group to be of
        consumes: nothing    waits for: members, the learner    woken by: a member that ends, ``learner_is_at``
        """
        changed = asyncio.Event()
        self._waiting.add(changed)
        for member in members:
            member.add_done_callback(lambda _: changed.set())
        try:
            while not all(member.done() for member in members):
                changed.clear()
                if self._must_go(members, self._counted(starts.values(), asked_at)):
                    for member in members:
                        member.cancel()  # nothing happens to those that are done
                    return
                await changed.wait()
        finally:
            self._waiting.discard(changed)

    def _counted(self, versions: Iterable[int], asked_at: int) -> list[int]:
        return [min(version, asked_at) if self._are_waited_for else version for version in versions]

    def _must_go(self, members: Sequence[asyncio.Task[Any]], versions: Sequence[int]) -> bool:
        last = min(versions, default=0) + self._max_staleness
        action = group_action(
            versions,
            [member.done() for member in members],
            group_size=len(members),
            policy_version=min(self._policy_version + 1, last),
            max_staleness=self._max_staleness,
            at_least=self._min_group,
        )
        return action == "train"
