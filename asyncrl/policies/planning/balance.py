"""Whether the split of a run that is up fits what its learner and its engines turned out to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.policies.planning.allocation import Split, Units

LIMITING: Final = 0.9
"""A side that is busy for this share of the time limits the run. Where none is, something else does: slow rewards, long
answers, the staleness bound; another split would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A split that would train ``gain`` times as many tokens a second."""

    split: Split
    gain: float


def better_split(
    now: Split, units: Units, *, learner_busy: float, engines_busy: float, joined: int = 0
) -> Better | None:
    """The best split of the same GPUs by proportion; None where ``now`` is, or neither side limits the run.

    learner_busy, engines_busy  shares of the time in which each had something to do, in (0, 1]
    joined                      engines besides, whose GPUs are not the run's to split

    What a side can do is what it does now by its busy share, and grows with its GPUs.
    """
    if max(learner_busy, engines_busy) < LIMITING or not now.engines:
        return None
    gpus = now.copies * units.copy + now.engines * units.engine

    def rate(split: Split) -> float:
        """Relative to now."""
        engines = (split.engines + joined) / (now.engines + joined)
        return min(split.copies / now.copies / learner_busy, engines / engines_busy)

    best = max(units.splits(gpus), key=rate)
    gain = rate(best) / rate(now)
    return Better(split=best, gain=gain) if best != now and gain > 1 else None
