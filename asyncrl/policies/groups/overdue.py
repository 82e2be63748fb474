"""Which prompts are issued again because the worker or client that took them does not answer.

A client that keeps prompts, or a worker that hangs, would otherwise hold up the run forever. There are two rules. Both
apply only after no group was answered for ``seconds``:

  all wait   every worker waits for prompts, so no worker that sends heartbeats is working on any: all outstanding
             prompts are issued again
  stragglers some workers are busy: groups that have taken four times as long as earlier groups are issued again, like
             the backup tasks of MapReduce (Dean and Ghemawat, 2004, section 3.6). The reference is the median of
             earlier groups, or the 0.9 quantile if workers load weights only between groups: there, a copy that loses
             delays the weight load of its worker

The first answer to a group counts. If a client without heartbeats took everything, the run reports it and keeps
issuing prompts until the client stops; restarting the learner would give the client the same prompts again.
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
"""After this many reissues without an answer, reissuing no longer counts as a remedy: something else is wrong."""
_SLOWER: Final = 4.0
"""Factor on a quantile, so that prompts that were kept do not make the next wait longer."""
_QUANTILE, _CAREFUL_QUANTILE = 0.5, 0.9
_FIRST: Final = 30.0
"""Factor on ``seconds`` until the first group is answered."""
_REMEMBERED: Final = 64
_LOOKS_APART: Final = 10.0
"""A longer gap between two looks, in seconds, does not count as waiting: this process may have received nothing."""


@dataclass(slots=True)
class _Issued:
    """Times on the clock of ``look``.  first: when the prompt was first issued;  since: when it was last issued"""

    first: float
    since: float
    times: int = 0


class Overdue:
    """Decides, from repeated looks at the outstanding groups, which prompts to issue again.

    seconds             time without any answer before a prompt is issued again; 0: never
    next_group_id, now  as in ``look``, at the start
    copies_stragglers   whether to copy stragglers early, because workers can load weights in the middle of groups
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

        next_group_id  ids below it were issued; groups that came and went between two looks count as answered
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
        """Whether no group was answered for so long that some groups may be due."""
        return 0 < self._seconds <= self._looked - self._heard

    def due(self, *, all_wait: bool, undelivered: int = 0) -> list[int]:
        """Return the groups to issue again now. A straggler waits longer each time: twice, then three times as long.

        all_wait     whether every worker waits for prompts (the first rule)
        undelivered  prompts that are still on the bus because no worker took them
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
        """Number of groups whose prompts were taken by a client that sends no heartbeats and answers none of them.

        An estimate; it drops to 0 once any group is answered.
        """
        return len(self._issued) if self._is_kept else 0

    @property
    def reissues_left(self) -> int:
        """How often all outstanding groups can still be issued again before giving up on this remedy."""
        if not self._seconds or not self._issued:
            return 0
        return max(0, REISSUES - min(one.times for one in self._issued.values()))


def all_wait_for_prompts(beats: Iterable[Heartbeat]) -> bool:
    """Return whether there are rollout workers, and each one that has started waits only for prompts."""
    workers = [beat for beat in beats if beat.role == WORKER and beat.phase not in ("starting", QUARANTINED)]
    waits = [[wait.on for wait in beat.waits if wait.on] for beat in workers]
    return bool(waits) and all(found and set(found) == {PROMPT_SOURCE} for found in waits)
