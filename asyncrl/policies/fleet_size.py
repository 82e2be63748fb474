"""How many rollout workers a run should have, given how busy the learner and the engines are. Pure.

The number of workers determines how much is sampled, but not how much the learner can train:

  more   the engines are busy nearly all the time and the learner waits: as many workers as keep the learner busy, at
         most twice as many as now
  fewer  the learner is busy nearly all the time, and engines wait or their samples are discarded as too old: as many
         workers as sample what is trained, plus a reserve
  else   no change

A decision uses STEPS steps with the same workers, so the effect of each change is seen before the next. While
the load stays the same, a change to more workers is never followed by a change to fewer, or the reverse: see
test_a_fleet_comes_to_rest.
Tests: tests/unit/policies/test_fleet_size.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

STEPS: Final = 10
LIMITING: Final = 0.9
"""A side that is busy for this share of the time limits the run."""
IDLE: Final = 0.15
"""Share of the time that a side must wait before the fleet changes for it."""
RESERVE: Final = 0.9
"""After shrinking, the engines are busy for at most this share of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares over some steps, each in [0, 1].

    learner_busy  share of the time in which the learner trained
    engines_busy  share of the time in which engines had work
    discarded     share of the answers that were discarded as too old
    """

    learner_busy: float
    engines_busy: float
    discarded: float = 0.0


def better_size(now: int, shares: Shares) -> int:
    """Return the number of workers that the run should have instead of ``now``, at least 1."""
    if shares.engines_busy >= LIMITING and shares.learner_busy < 1 - IDLE:
        return min(2 * now, math.ceil(now * shares.engines_busy / max(shares.learner_busy, 1e-9)))
    useful = shares.engines_busy * (1 - shares.discarded)
    if shares.learner_busy >= LIMITING and useful < 1 - IDLE:
        return min(now, max(1, math.ceil(now * useful / RESERVE)))
    return now


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new number of the run's own workers, and the reason in words."""

    workers: int
    because: str


class FleetSizer:
    """Decides how many workers of its own a run should have. Joined workers only count as sampling capacity.

    least, most  limits of own workers; a number that an operator sets outside of them stays
    warmup       first steps, which fill the window and do not count
    """

    def __init__(self, *, least: int, most: int, warmup: int = 0) -> None:
        self._least, self._most, self._left = least, most, warmup
        self._workers = 0
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=STEPS)
        """For each step with the current workers: seconds, seconds of training, seconds of busy engines, discarded
        share."""

    def limit_to(self, most: int) -> None:
        """No more than ``most`` own workers are available."""
        self._most = min(self._most, most)

    def update(self, numbers: Mapping[str, float], *, own: int) -> Change | None:
        """Take in a step's metrics and return a change, if any. ``own``: own workers that are requested now."""
        workers = int(numbers.get("rollout/workers", 0))
        if self._left or not workers:
            self._left = max(0, self._left - 1)
            return None
        if workers != self._workers:
            self._workers = workers
            self._steps.clear()
        trained = numbers.get("learner/step_seconds", 0.0)
        elapsed = trained + numbers.get("learner/wait_seconds", 0.0)
        busy = (1 - numbers.get("rollout/idle_ratio", 0.0)) * elapsed
        self._steps.append((elapsed, trained, busy, numbers.get("staleness/dropped_share", 0.0)))
        if len(self._steps) < STEPS or not self._least <= own <= self._most:
            return None
        return self._decided(own)

    def _decided(self, own: int) -> Change | None:
        seconds, trained, busy, _ = map(sum, zip(*self._steps, strict=True))
        shares = Shares(
            learner_busy=_share(trained, seconds),
            engines_busy=_share(busy, seconds),
            discarded=_share(self._steps[-1][3], 1.0),  # already a mean over several steps
        )
        wanted = own + better_size(self._workers, shares) - self._workers
        wanted = min(max(wanted, self._least), self._most)
        if wanted == own:
            return None
        self._steps.clear()
        return Change(
            workers=wanted,
            because=f"in {STEPS} steps the learner was idle for {1 - shares.learner_busy:.0%} of the time and engines "
            f"for {1 - shares.engines_busy:.0%}, and {shares.discarded:.0%} of the answers were too old",
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / max(whole, 1e-9)))
