"""Curves and histograms over steps in bounded memory. Pure.

If there are too many points, neighbours are merged: a long run is shown at a lower resolution, but completely.

Tests: tests/unit/board/test_series.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

MOST_POINTS: Final = 2000
MOST_COLUMNS: Final = 400
MOST_BINS: Final = 64
"""Maximum number of bins of a histogram; the last bin also counts everything beyond."""


class Curve:
    """One metric over steps. A point is the mean over ``stride`` steps, at the last of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.stride = 1
        self._pending: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Add a value. If the step is not new, a resumed learner trained it again, and later points are dropped."""
        self.rewind(step)
        self._pending.append(value)
        if len(self._pending) < self.stride:
            return
        self.steps.append(step)
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.steps) > MOST_POINTS:
            self._halve()

    def rewind(self, step: int) -> None:
        if self.steps and self.steps[-1] >= step:
            self._pending = []
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def _halve(self) -> None:
        if len(self.steps) % 2:  # the last point has no neighbour yet
            self._pending = [self.values.pop()] * self.stride
            self.steps.pop()
        self.steps = self.steps[1::2]
        self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
        self.stride *= 2


class Columns:
    """A histogram per step. A column is the sum over ``stride`` steps, and starts at the first of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.counts: list[list[int]] = []
        self.stride = 1
        self._in_last = 0

    def add(self, step: int, counts: Sequence[int]) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.counts.pop()
            self._in_last = self.stride
        if self.steps and self._in_last < self.stride:
            self.counts[-1] = _summed(self.counts[-1], folded(counts))
            self._in_last += 1
            return
        self.steps.append(step)
        self.counts.append(folded(counts))
        self._in_last = 1
        if len(self.steps) > MOST_COLUMNS:
            self._halve()

    def _halve(self) -> None:
        pairs = zip_longest(self.counts[::2], self.counts[1::2], fillvalue=list[int]())
        self._in_last += self.stride if len(self.steps) % 2 == 0 else 0
        self.steps, self.counts = self.steps[::2], [_summed(list(a), list(b)) for a, b in pairs]
        self.stride *= 2


def folded(counts: Sequence[int]) -> list[int]:
    """Limit a histogram to MOST_BINS bins; the last one also counts everything beyond."""
    if len(counts) <= MOST_BINS:
        return list(counts)
    return [*counts[: MOST_BINS - 1], sum(counts[MOST_BINS - 1 :])]


def _summed(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
