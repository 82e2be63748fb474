"""Which groups and answers are worth training, and the reward of answers that run long. Decided before the batch.

A group filter is any function (TrajectoryGroup) -> bool, True to keep; the run file names ours or a "module:function".
A filtered group is released from the admission window and counted, so that the next one is generated in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.messages import TrajectoryGroup

GroupFilter = Callable[[TrajectoryGroup], bool]


def has_spread(rewards: ArrayLike, *, tolerance: float = 1e-6) -> bool:
    """Whether a group's rewards differ: their standard deviation is over the tolerance.  [G] -> bool

    Without, every group baseline gives advantages of 0. A group of one has no spread.
    Source: dynamic sampling of DAPO, arXiv:2503.14476 section 3.2; the tolerance is slime's.
    """
    values = np.asarray(rewards, np.float64)
    return len(values) > 1 and float(values.std(ddof=1)) > tolerance


def dynamic_sampling(group: TrajectoryGroup) -> bool:
    """Group filter: keeps a group whose rewards differ (``has_spread``)."""
    return has_spread(group.rewards)


def overlong_penalty(
    lengths: ArrayLike,
    *,
    max_tokens: float,
    cache_tokens: float,
    factor: float = 1.0,
    has_floor: bool = True,
) -> NDArray[Any]:
    """What to add to the reward of a long answer: 0, then falling to -factor over the last ``cache_tokens``.

    Response tokens [B] -> f64[B] in [-factor, 0]. From max_tokens - cache_tokens on it falls linearly and reaches
    -factor at max_tokens. Beyond it stays there (the paper), or with ``has_floor=False`` falls on (verl, AReaL).
    Source: soft overlong punishment of DAPO, arXiv:2503.14476 eq. 13.
    """
    if cache_tokens <= 0:
        raise ValueError(f"cache_tokens must be > 0, got {cache_tokens}")
    excess = np.asarray(lengths, np.float64) - (max_tokens - cache_tokens)
    penalty = -factor * np.maximum(excess, 0.0) / cache_tokens
    return np.maximum(penalty, -factor) if has_floor else penalty


def overlong_masks(masks: Sequence[NDArray[np.bool_]], finish_reasons: Sequence[str]) -> list[NDArray[np.bool_]]:
    """The response masks with truncated answers masked altogether: nothing is learned from a reward of half an answer.

    [B] bool[T], "length" where the answer was cut -> [B] bool[T]. They still count in the group's statistics.
    Source: overlong filtering of DAPO, arXiv:2503.14476 section 3.4; a switch of its own, not part of the shaping.
    """
    return [mask & (reason != "length") for mask, reason in zip(masks, finish_reasons, strict=True)]
