"""Which prompts are issued once more, because whoever took them does not answer.

The first answer to a group counts, so a second worker that samples it costs idle slots and nothing else: the backup
tasks of MapReduce (Dean and Ghemawat, 2004, section 3.6). A worker that keeps prompts, or hangs with them, then holds
up the run for as long as it takes another to answer.

Tests: tests/unit/policies/groups/test_overdue.py.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

REISSUES: Final = 2
"""Issued this often in vain, what is outstanding is not waited for any more: something else is wrong."""
_SLOWER: Final = 4.0
"""A group is late when it takes this many times the median of those before it; the median, because what somebody kept
must not make the next wait longer."""
_REMEMBERED: Final = 64
_UNKNOWN: Final = 5
"""Before the first answer, when engines may still be starting, all times are this many times as long."""


@dataclass(slots=True)
class _Issued:
    """since: when its prompt was issued last;  first: when at first, both on the clock of ``look``"""

    first: float
    since: float
    times: int = 0


class Overdue:
    """Looks at the outstanding groups again and again.

    seconds             without any answer, until the first is issued once more; 0: none ever is
    next_group_id, now  as in ``look``, at the start
    """

    def __init__(self, seconds: float, *, next_group_id: int = 0, now: float = 0.0) -> None:
        self._seconds = seconds
        self._issued: dict[int, _Issued] = {}
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._looked = self._heard = now
        self._next = next_group_id

    def look(self, outstanding: Collection[int], *, next_group_id: int, now: float) -> list[int]:
        """The groups, of those ``outstanding``, to issue again at once. Each waits longer the next time: twice,
        then three times as long.

        next_group_id  ids below it were issued: what came and went between two looks counts, too
        now            seconds, monotonic
        """
        gone = self._issued.keys() - set(outstanding)
        unseen = len(set(range(self._next, next_group_id)).difference(outstanding))
        took = [now - self._issued.pop(group_id).first for group_id in gone]
        self._took.extend([*took, *[now - self._looked] * unseen])
        if gone or unseen:
            self._heard = now
        self._looked, self._next = now, next_group_id
        for group_id in outstanding:
            self._issued.setdefault(group_id, _Issued(first=now, since=now))
        if not self._seconds or now - self._heard < self._quiet_seconds:
            return []
        due = [i for i, one in self._issued.items() if now - one.since >= self._patience * (one.times + 1)]
        for group_id in due:
            one = self._issued[group_id]
            one.since, one.times = now, one.times + 1
        return sorted(due)

    @property
    def reissues_left(self) -> int:
        """How often every group that is outstanding will be issued again before that counts as in vain."""
        if not self._seconds or not self._issued:
            return 0
        return max(0, REISSUES - min(one.times for one in self._issued.values()))

    @property
    def _quiet_seconds(self) -> float:
        return self._seconds * (1 if self._took else _UNKNOWN)

    @property
    def _patience(self) -> float:
        return max(self._quiet_seconds, _SLOWER * (statistics.median(self._took) if self._took else 0.0))
