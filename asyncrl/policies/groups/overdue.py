"""When prompts are issued again because the client that took them does not answer.

A client that keeps prompts would otherwise hold up the run forever. All outstanding prompts are issued again once no
group was answered or published for ``seconds`` while every worker waits for prompts: then no worker that sends
heartbeats is working on any of them. The first answer to a group counts. If a client without heartbeats takes them all,
they are issued again and again until it stops.
Tests: tests/unit/policies/groups/test_overdue.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import BEGINS_NOTHING, PROMPT_SOURCE, WORKER

_LOOKS_APART: Final = 10.0
"""A longer gap between two looks, in seconds, does not count as waiting: this process may have received nothing."""


class Overdue:
    """Decides, from repeated looks at the outstanding groups, when to issue their prompts again.

    seconds  time without any change before prompts are issued again; 0: never
    """

    def __init__(self, seconds: float, *, next_group_id: int = 0, now: float = 0.0) -> None:
        self._seconds = seconds
        self._outstanding: set[int] = set()
        self._next = next_group_id
        self._since = self._looked = now  # since the last change or reissue; of the last look

    def look(self, outstanding: Collection[int], *, next_group_id: int, now: float) -> None:
        """Note which groups are outstanding.

        next_group_id  ids below it were issued; groups that came and went between two looks count as answered
        now            seconds, monotonic
        """
        if (gap := now - self._looked) > _LOOKS_APART:
            self._since += gap
        self._looked = now
        if (set(outstanding), next_group_id) != (self._outstanding, self._next):
            self._outstanding, self._next = set(outstanding), next_group_id
            self._since = now

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has changed for so long that prompts may be due."""
        return 0 < self._seconds <= self._looked - self._since and bool(self._outstanding)

    def due(self, *, all_wait: bool) -> list[int]:
        """Return the groups to issue again now. ``all_wait``: whether every worker waits for prompts."""
        if not self.is_quiet or not all_wait:
            return []
        self._since = self._looked
        return sorted(self._outstanding)


def all_wait_for_prompts(beats: Iterable[Heartbeat]) -> bool:
    """Return whether there are rollout workers, and each one that has started waits only for prompts."""
    workers = [beat for beat in beats if beat.role == WORKER and beat.phase not in BEGINS_NOTHING]
    waits = [[wait.on for wait in beat.waits if wait.on] for beat in workers]
    return bool(waits) and all(found and set(found) == {PROMPT_SOURCE} for found in waits)
