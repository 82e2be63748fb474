"""A metric: a number, or a histogram of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """``counts[i]`` values lie in [edges[i], edges[i+1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


Metric: TypeAlias = float | Histogram


def histogram(values: Sequence[int]) -> Histogram:
    """Return counts over powers of two: [0, 1), [1, 2), [2, 4), … up to the largest value."""
    top = max(values, default=0)
    edges = [0.0, 1.0]
    while edges[-1] <= top:
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(values, bins=edges)
    return Histogram(edges=tuple(edges), counts=tuple(int(count) for count in counts))
