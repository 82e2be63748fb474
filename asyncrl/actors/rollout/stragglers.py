"""Cuts stragglers: before a group gets too old to be trained, its finished samples are published without the others.

Only the worker knows how far each sample is; the learner's progress shows how old the group would be. The learner takes
the batch of version v + 1 as soon as the step from v ends, and the group must be in the log by then. Therefore
samplers.group_action is asked about that next batch. A group whose oldest token is of version v is published, with at
least ``min_group`` samples, once the learner is at v + max_staleness - 1. While fewer samples are done, the worker
waits even beyond the bound, but only until ``min_group`` are done: a group that will be dropped should not hold an
engine for its last sample.

The cut samples are the longest ones. The group carries their number: each cut group is an event, and the numbers add up
to staleness/cancelled of the step. Tests: tests/actors/rollout/test_stragglers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncrl.actors.rollout.over_sampling import is_made
from asyncrl.policies.staleness.samplers import group_action


class Stragglers:
    """Cuts stragglers of all groups of one worker."""

    def __init__(self, *, max_staleness: int, min_group: int, are_waited_for: bool = False) -> None:
        """are_waited_for: the learner waits for groups in progress (staleness.eviction = "wait"). Until it learns which
        version began a group, it counts from the version that the prompt asked for. The worker must do the same, or
        worker and learner might wait for each other."""
        self._max_staleness = max_staleness
        self._min_group = min_group
        self._are_waited_for = are_waited_for
        self._policy_version = 0
        self._waiting: set[asyncio.Event] = set()

    def learner_is_at(self, policy_version: int) -> None:
        self._policy_version = policy_version
        for changed in self._waiting:
            changed.set()

    async def cut(
        self,
        samples: Sequence[asyncio.Task[Any]],
        versions: Callable[[], Iterable[int]],
        *,
        asked_at: int = 0,
        min_without_failed: int = 0,
    ) -> None:
        """Cancel unfinished samples once the finished ones must go; return when all are done or cancelled.

        versions            returns the policy versions at which the begun samples started
        asked_at            oldest version that the learner assumes for the group
        min_without_failed  fewest finished samples of a group in which a sample has failed
        consumes: nothing    waits for: samples, the learner    woken by: a sample that ends, ``learner_is_at``
        """
        changed = asyncio.Event()
        self._waiting.add(changed)
        for sample in samples:
            sample.add_done_callback(lambda _: changed.set())
        try:
            while not all(sample.done() for sample in samples):
                changed.clear()
                if self._must_go(samples, self._counted(versions(), asked_at), min_without_failed):
                    for sample in samples:
                        sample.cancel()  # no effect on finished samples
                    return
                await changed.wait()
        finally:
            self._waiting.discard(changed)

    def _counted(self, versions: Iterable[int], asked_at: int) -> list[int]:
        return [min(version, asked_at) if self._are_waited_for else version for version in versions]

    def _must_go(self, samples: Sequence[asyncio.Task[Any]], versions: Sequence[int], min_without_failed: int) -> bool:
        last = min(versions, default=0) + self._max_staleness
        are_made = [is_made(sample) for sample in samples]
        has_failed = any(sample.done() and not made for sample, made in zip(samples, are_made, strict=True))
        action = group_action(
            versions,
            are_made,
            group_size=len(samples),
            policy_version=min(self._policy_version + 1, last),
            max_staleness=self._max_staleness,
            at_least=max(self._min_group, min_without_failed) if has_failed else self._min_group,
        )
        return action == "train"
