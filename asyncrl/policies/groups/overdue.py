"""Which prompts are issued again, because whoever took them does not answer.

A client that keeps prompts, or a worker that hangs with them, would hold up the run for good. Two rules, both only once
no group was answered for ``seconds``:

  all wait   every worker waits for prompts, so nobody who says what it does is at work on any: all are issued again
  stragglers some are at work; groups that took four times as long as those before are issued again, as the backup
             tasks of MapReduce (Dean and Ghemawat, 2004, section 3.6): as the median, or, where workers load weights
             only between groups and a copy that loses keeps its worker from loading, as nine of ten

The first answer to a group counts. If everything was taken by somebody of whom nothing is heard, that is said, and goes
on until it ends: restarting the learner would give it the same prompts again.
Tests: tests/unit/policies/groups/test_overdue.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncrl.messages import Heartbeat
from asyncrl.policies.health.faults import PROMPT_SOURCE, QUARANTINED, WORKER

KEPT: Final = "learner/kept_prompts"
"""Name of Overdue.num_kept in the learner's heartbeat."""
REISSUES_LEFT: Final = "learner/reissues_left"
"""Name of Overdue.reissues_left in the learner's heartbeat."""
REISSUES: Final = 3
"""Issued this often in vain, what is outstanding is not waited for any more: something else is wrong."""
_SLOWER: Final = 4.0
"""Times a quantile, because what somebody kept must not make the next wait longer."""
_QUANTILE, _CAREFUL_QUANTILE = 0.5, 0.9
_FIRST: Final = 30.0
"""Times ``seconds``, as long as no group was ever answered."""
_REMEMBERED: Final = 64
_LOOKS_APART: Final = 10.0
"""Seconds between two looks in which this process may have been deaf: they count for nothing."""


@dataclass(slots=True)
class _Issued:
    """since: when its prompt was issued last;  first: when at first, both on the clock of ``look``"""

    first: float
    since: float
    times: int = 0


class Overdue:
    """Looks at the outstanding groups again and again.

    seconds             without any answer before something is issued again; 0: nothing ever is
    next_group_id, now  as in ``look``, at the start
    copies_stragglers   soon, as workers load weights in the middle of groups
    """

    def __init__(
        self, seconds: float, *, next_group_id: int = 0, now: float = 0.0, copies_stragglers: bool = True
    ) -> None:
        self._seconds, self._copies_stragglers = seconds, copies_stragglers
        self._issued: dict[int, _Issued] = {}
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._looked = self._heard = now
        self._next = next_group_id
        self._is_kept = False

    def look(self, outstanding: Collection[int], *, next_group_id: int, now: float) -> None:
        """Note which groups are outstanding.

        next_group_id  ids below it were issued: what came and went between two looks counts, too
        now            seconds, monotonic
        """
        if (gap := now - self._looked) > _LOOKS_APART:
            self._heard += gap
            for one in self._issued.values():
                one.first, one.since = one.first + gap, one.since + gap
        gone = self._issued.keys() - set(outstanding)
        unseen = len(set(range(self._next, next_group_id)).difference(outstanding))
        took = [now - self._issued.pop(group_id).first for group_id in gone]
        self._took.extend([*took, *[now - self._looked] * unseen])
        if gone or unseen:
            self._heard, self._is_kept = now, False
        self._looked, self._next = now, next_group_id
        for group_id in outstanding:
            self._issued.setdefault(group_id, _Issued(first=now, since=now))

    @property
    def is_quiet(self) -> bool:
        """No group was answered for so long that some may be due."""
        return 0 < self._seconds <= self._looked - self._heard

    def due(self, *, all_wait: bool, undelivered: int = 0) -> list[int]:
        """The groups to issue again at once. A straggler waits longer the next time: twice, then three times as long.

        all_wait     the first rule, for every worker waits for prompts
        undelivered  prompts that are still on the bus because nobody took them
        """
        if not self.is_quiet:
            return []
        patience = self._seconds if all_wait else max(self._seconds, self._straggler_seconds())
        waited = {group_id: self._looked - one.since for group_id, one in self._issued.items()}
        times = {group_id: 1 if all_wait else one.times + 1 for group_id, one in self._issued.items()}
        due = [group_id for group_id in self._issued if waited[group_id] >= patience * times[group_id]]
        for group_id in due:
            one = self._issued[group_id]
            one.since, one.times = self._looked, one.times + 1
        if due:
            self._is_kept = all_wait and not undelivered
        return sorted(due)

    def _straggler_seconds(self) -> float:
        if not self._took:
            return _FIRST * self._seconds
        took = sorted(self._took)
        return _SLOWER * took[int(len(took) * (_QUANTILE if self._copies_stragglers else _CAREFUL_QUANTILE))]

    @property
    def num_kept(self) -> int:
        """Groups whose prompts were taken by somebody who answers none of them and of whom nothing is heard, as far as
        that is known; 0 again once any is answered."""
        return len(self._issued) if self._is_kept else 0

    @property
    def reissues_left(self) -> int:
        """How often everything that is outstanding will be issued again before that counts as in vain."""
        if not self._seconds or not self._issued:
            return 0
        return max(0, REISSUES - min(one.times for one in self._issued.values()))


def all_wait_for_prompts(beats: Iterable[Heartbeat]) -> bool:
    """Whether there are rollout workers, and each that has started waits for prompts and for nothing else."""
    workers = [beat for beat in beats if beat.role == WORKER and beat.phase not in ("starting", QUARANTINED)]
    waits = [[wait.on for wait in beat.waits if wait.on] for beat in workers]
    return bool(waits) and all(found and set(found) == {PROMPT_SOURCE} for found in waits)
