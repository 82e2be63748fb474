"""Finds the groups that make a step fail, so that the rest of the batch can be trained.

    a step fails -> halves of its batch are rehearsed, then halves of failing halves, down to single groups

A group is to blame if a step fails with that group alone while a step without it is possible at the same time. The
second condition matters because a machine that is short of memory or descriptors for some seconds fails any step. So a
group that failed alone is tried once more between two groups that pass: others of its batch, the newest trained group,
or buffered ones. If none of them passes, the cause is not the data. If each group passes alone (too little memory for
all of them together, a transient fault), no group is to blame. The order of the batch alone decides which halves are
tried. Nothing is trained during the search.

Tests: tests/actors/learner/test_batch_bisector.py.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Final

from asyncrl.actors.learner.batcher import Batcher
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.state.in_progress import InProgress, LogEntry

Attempt = Callable[[Sequence[BufferedGroup]], Awaitable[str]]
"""Returns why a step with these groups fails; "" if it does not fail."""

OTHERS: Final = 4
"""At most this many groups outside the batch are tried before the failure is declared not to be caused by data."""


class BatchBisector:
    """One per learner. Remembers a trained group as proof that a step is possible."""

    def __init__(self, *, table: GroupTable, batcher: Batcher, trainer: Trainer, in_progress: InProgress) -> None:
        self._table, self._batcher, self._trainer = table, batcher, trainer
        self._in_progress = in_progress
        self._proof: tuple[BufferedGroup, int] | None = None

    def note_trained(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> None:
        """Note that a step from ``policy_version`` was done with these groups."""
        self._proof = (min(groups, key=lambda one: (one.num_tokens, one.group_id)), policy_version)

    async def bisect(self, batch: Sequence[BufferedGroup]) -> dict[int, str] | None:
        """Map ids of groups to the reason why no step can be made with them. None if no step can be made at all.

        Raises errors that end the learner whatever the batch.
        """
        failed = await find(batch, self._attempt)
        if not failed:
            return {}
        if not await self._can_step(batch, failed):
            return None
        guilty = {
            one.group_id: problem for one in batch if one.group_id in failed and (problem := await self._attempt([one]))
        }
        if guilty and not await self._can_step(batch, failed):
            return None
        return guilty

    async def clear_suspects(self, batch: Sequence[BufferedGroup]) -> dict[int, str]:
        """Rehearse alone each group that was being decoded or trained when the previous incarnation ended. If one ends
        this incarnation as well, its identity is then known. Return group id -> reason for groups that only fail."""
        found: dict[int, str] = {}
        for one in batch:
            entry = entry_of(one)
            if entry.identity in self._in_progress.suspects:
                if problem := await self._attempt([one]):
                    found[one.group_id] = problem
                self._in_progress.tried(entry, is_cleared=self._trainer.can_rehearse)
        return found

    async def _attempt(self, groups: Sequence[BufferedGroup], *, policy_version: int | None = None) -> str:
        version = self._table.policy_version if policy_version is None else policy_version
        prepare = functools.partial(self._batcher.prepare_now, groups, policy_version=version)
        self._in_progress.train(map(entry_of, groups))
        return await self._trainer.rehearse(prepare, step=self._table.step)

    async def _can_step(self, batch: Sequence[BufferedGroup], failed: Container[int]) -> bool:
        """Return whether any group other than the failed ones can be trained now."""
        tried = {one.group_id for one in batch}
        passed = [(one, None) for one in batch if one.group_id not in failed]
        others = [(one, None) for one in self._table.buffered.values() if one.group_id not in tried]
        for one, policy_version in [*passed[:1], *([self._proof] if self._proof else []), *others[:OTHERS]]:
            if not await self._attempt([one], policy_version=policy_version):
                return True
        return False


def entry_of(one: BufferedGroup) -> LogEntry:
    """Return the log record that contained the group."""
    return LogEntry(one.sequence, str(one.group_id), one.group.worker)


async def find(batch: Sequence[BufferedGroup], attempt: Attempt) -> dict[int, str]:
    """Map ids of the groups of ``batch`` that fail alone to the reason, found by repeated halving."""
    problem = await attempt(batch)
    if not problem:
        return {}
    if len(batch) == 1:
        return {batch[0].group_id: problem}
    middle = len(batch) // 2
    return await find(batch[:middle], attempt) | await find(batch[middle:], attempt)
