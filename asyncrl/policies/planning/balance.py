"""Whether the split of a run that is up fits what its learner and its engines turned out to take."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.policies.planning.allocation import Split, Units


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A split that would train ``gain`` times as many tokens a second."""

    split: Split
    gain: float


def better_split(now: Split, units: Units, *, learner_busy: float, engines_busy: float) -> Better | None:
    """The best split of the same GPUs by proportion, None where ``now`` is.

    learner_busy, engines_busy  shares of the time in which each had something to do, in (0, 1]

    Each side's limit is what it does now by its busy share, and grows with its GPUs. An engine that has few sequences
    to decode could take more and counts as busy all the same, so this promises too little rather than too much.
    """
    gpus = now.copies * units.copy + now.engines * units.engine

    def rate(split: Split) -> float:
        """Relative to now."""
        return min(split.copies / now.copies / learner_busy, split.engines / now.engines / engines_busy)

    best = max(units.splits(gpus), key=rate)
    gain = rate(best) / rate(now)
    return Better(split=best, gain=gain) if best != now and gain > 1 else None
