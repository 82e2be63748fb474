"""Whether the GPU split of a running run fits the measured load of its learner and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.policies.planning.allocation import Split, Units

LIMITING: Final = 0.9
"""A side that is busy for this share of the time limits the run. If neither is, something else limits it, such as slow
rewards, long answers or the staleness bound, and another split would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A split that would train ``gain`` times as many tokens per second."""

    split: Split
    gain: float


def better_split(
    now: Split, units: Units, *, learner_busy: float, engines_busy: float, joined: int = 0
) -> Better | None:
    """Return the best split of the same GPUs; None if that is ``now``, or if neither side limits the run.

    learner_busy, engines_busy  shares of the time in which each side had work, in (0, 1]
    joined                      additional engines, whose GPUs the run cannot reassign

    The capacity of a side is its current rate divided by its busy share, and is proportional to its GPUs.
    """
    if max(learner_busy, engines_busy) < LIMITING or not now.engines:
        return None
    gpus = now.copies * units.copy + now.engines * units.engine

    def rate(split: Split) -> float:
        """Return the rate relative to now."""
        engines = (split.engines + joined) / (now.engines + joined)
        return min(split.copies / now.copies / learner_busy, engines / engines_busy)

    best = max(units.splits(gpus), key=rate)
    gain = rate(best) / rate(now)
    return Better(split=best, gain=gain) if best != now and gain > 1 else None
