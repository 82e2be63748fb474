"""Filters for groups and answers, and the reward penalty for overlong answers. Applied before the batch is built.

A group filter is any function (TrajectoryGroup) -> bool | str that returns True to keep the group, and False or a short
reason to reject it. The run file names one of ours or a "module:function". A filtered group leaves the admission window
and is counted (staleness/filtered/FILTER, or FILTER/REASON), so the next group is generated in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.messages import TrajectoryGroup

GroupFilter = Callable[[TrajectoryGroup], bool | str]


def has_spread(rewards: ArrayLike, *, tolerance: float = 1e-6) -> bool:
    """Return whether a group's rewards differ: their standard deviation is over the tolerance.  [G] -> bool

    With equal rewards every group baseline gives advantages of 0. A group of one has no spread.
    Source: dynamic sampling of DAPO, arXiv:2503.14476 section 3.2; the tolerance is slime's.
    """
    values = np.asarray(rewards, np.float64)
    return len(values) > 1 and float(values.std(ddof=1)) > tolerance


def dynamic_sampling(group: TrajectoryGroup) -> bool:
    """Group filter that keeps a group if its rewards differ (``has_spread``)."""
    return has_spread(group.rewards)


def overlong_penalty(
    lengths: ArrayLike,
    *,
    max_tokens: float,
    cache_tokens: float,
    factor: float = 1.0,
    has_floor: bool = True,
) -> NDArray[Any]:
    """Return what to add to the reward of an answer: 0, then falling to -factor over the last ``cache_tokens``.

    Response tokens [B] -> f64[B] <= 0. The penalty falls linearly from max_tokens - cache_tokens on and
    reaches -factor at max_tokens. Beyond, it stays at -factor (the paper), or keeps falling with ``has_floor=False``
    (verl, AReaL). Source: soft overlong punishment of DAPO, arXiv:2503.14476 eq. 13.
    """
    if cache_tokens <= 0:
        raise ValueError(f"cache_tokens must be > 0, got {cache_tokens}")
    excess = np.asarray(lengths, np.float64) - (max_tokens - cache_tokens)
    penalty = -factor * np.maximum(excess, 0.0) / cache_tokens
    return np.maximum(penalty, -factor) if has_floor else penalty


def overlong_masks(masks: Sequence[NDArray[np.bool_]], finish_reasons: Sequence[str]) -> list[NDArray[np.bool_]]:
    """Return the response masks with truncated answers masked entirely: the reward of a cut answer teaches nothing.

    [B] bool[T], "length" where the answer was cut -> [B] bool[T]. Masked answers still count in group statistics.
    Source: overlong filtering of DAPO, arXiv:2503.14476 section 3.4; a separate switch, not part of reward shaping.
    """
    return [mask & (reason != "length") for mask, reason in zip(masks, finish_reasons, strict=True)]
