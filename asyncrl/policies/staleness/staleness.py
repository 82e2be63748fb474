"""How old a token is, also across a learner that fell back to an earlier checkpoint.

Staleness of a token = version being trained - version that sampled it, at the step that trains on it.

When a learner resumes from version k it starts a new incarnation. Tokens that weights of an older one sampled after
k come from a history the learner no longer has. They are good samples with known behavior logprobs, so they are
trained, and count as old as the last version both histories share: k. So a version (incarnation i, v) is worth

    effective = min(v, fork of every incarnation after i)        fork[j] = version from which j started

and staleness is measured against that. The bound holds for effective versions. Test:
tests/unit/policies/staleness/test_versions.py, test_versions_of_a_lost_history_count_as_old_as_the_fork.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.messages import Trajectory, VersionSpan

Forks = Mapping[int, int]
"""incarnation -> policy version from which it started. Incarnation 0 starts from 0 and need not be in it."""


def effective_version(span: VersionSpan, forks: Forks) -> int:
    """The newest version of the present history that had a part in sampling the span."""
    return min([span.policy_version, *(fork for incarnation, fork in forks.items() if incarnation > span.incarnation)])


def is_of_history(order: tuple[int, int], forks: Forks) -> bool:
    """Whether the version (incarnation, policy version) is one of the present history, or behind it."""
    incarnation, version = order
    return all(version <= fork for later, fork in forks.items() if later > incarnation)


def oldest_version(spans: Sequence[VersionSpan], forks: Forks) -> int:
    return min(effective_version(span, forks) for span in spans)


def sampled_spans(trajectory: Trajectory) -> tuple[tuple[VersionSpan, int], ...]:
    """The version spans of tokens that the policy sampled, with how many each has."""
    spans, mask = trajectory.version_spans, trajectory.response_mask
    ends = [span.start for span in spans[1:]] + [len(mask)]
    counts = [int(np.count_nonzero(mask[span.start : end])) for span, end in zip(spans, ends, strict=True)]
    return tuple((span, count) for span, count in zip(spans, counts, strict=True) if count)


def newest_version(trajectory: Trajectory, forks: Forks) -> int:
    """Of its newest sampled token; of the oldest where it has none."""
    found = [effective_version(span, forks) for span, _ in sampled_spans(trajectory)]
    return max(found, default=oldest_version(trajectory.version_spans, forks))


def per_token(spans: Sequence[VersionSpan], *, length: int, policy_version: int, forks: Forks) -> NDArray[np.int32]:
    """Staleness of each of ``length`` tokens when version ``policy_version`` is trained.  -> i32[length] >= 0

    A given answer that a lost history published later than the present one trains it is fresh.
    """
    ends = [span.start for span in spans[1:]] + [length]
    staleness = np.empty(length, np.int32)
    for span, end in zip(spans, ends, strict=True):
        staleness[span.start : end] = max(0, policy_version - effective_version(span, forks))
    return staleness


# -- weights that fall with age ----------------------------------------------------------------------------------------


def exponential_weight(staleness: ArrayLike, *, rate: float = 0.2) -> NDArray[np.float64]:
    """exp(-rate x staleness), in (0, 1].  i32[M] -> f64[M]

    These three are ours; no framework ships one. They multiply the loss weights, and shrink the gradient's size with
    the staleness: they are no correction of its direction.
    """
    weights: NDArray[np.float64] = np.exp(-rate * _age(staleness))
    return weights


def inverse_weight(staleness: ArrayLike) -> NDArray[np.float64]:
    """1 / (1 + staleness), in (0, 1].  i32[M] -> f64[M]"""
    return 1.0 / (1.0 + _age(staleness))


def linear_weight(staleness: ArrayLike, *, max_staleness: int) -> NDArray[np.float64]:
    """1 - staleness / (max_staleness + 1), never below 0: the oldest admitted still count.  i32[M] -> f64[M]"""
    return np.maximum(0.0, 1.0 - _age(staleness) / (max_staleness + 1))


AgeWeight = Callable[[ArrayLike], NDArray[np.float64]]
"""Staleness of tokens to what their loss weights are multiplied by, i32[M] -> f64[M] in [0, 1]."""


def age_weight(name: str, *, rate: float, max_staleness: int) -> AgeWeight | None:
    """The weight of that name: exponential, inverse or linear; None for the empty name. Raises KeyError for others."""
    if not name:
        return None
    weights: dict[str, AgeWeight] = {
        "exponential": functools.partial(exponential_weight, rate=rate),
        "inverse": inverse_weight,
        "linear": functools.partial(linear_weight, max_staleness=max_staleness),
    }
    return weights[name]


def _age(staleness: ArrayLike) -> NDArray[np.float64]:
    """Tokens of a lost history may be younger than the version that forked from it; they count as fresh."""
    return np.maximum(np.asarray(staleness, np.float64), 0.0)


# -- where the staleness came from -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Versions behind, of one group: while it was generated, and while it waited to be trained."""

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        return self.in_flight + self.in_queue


def lag(*, policy_version: int, start: int, end: int) -> Lag:
    """The lag of a group generated from version ``start`` to ``end`` when ``policy_version`` is trained.

    As prime-rl logs it, where step n trains version n - 1.
    """
    total = max(0, policy_version - start)
    in_flight = min(total, end - start)
    return Lag(in_flight=in_flight, in_queue=total - in_flight)


def is_stale(oldest: int, *, policy_version: int, max_staleness: int) -> bool:
    """Whether a group whose oldest token has version ``oldest`` is too old to be trained: the bound is inclusive."""
    return policy_version - oldest > max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessStatistics:
    """Of the tokens of several sequences.

    mean, smallest, largest  over all tokens
    oldest, newest, spread   per sequence, f64[S]: staleness of its oldest and its newest token, and their difference;
                             nan for a sequence without tokens
    """

    mean: float
    smallest: float
    largest: float
    oldest: NDArray[np.float64]
    newest: NDArray[np.float64]
    spread: NDArray[np.float64]


def statistics(staleness: ArrayLike, sequence: ArrayLike, *, num_sequences: int) -> StalenessStatistics:
    """What to log of a batch's staleness.  i32[M], i64[M] as in segments.py.  Raises ValueError when M is 0."""
    values, owner = np.asarray(staleness, np.float64), np.asarray(sequence, np.int64)
    oldest, newest = np.full(num_sequences, -np.inf), np.full(num_sequences, np.inf)
    np.maximum.at(oldest, owner, values)
    np.minimum.at(newest, owner, values)
    is_there = np.isfinite(oldest)
    oldest, newest = np.where(is_there, oldest, np.nan), np.where(is_there, newest, np.nan)
    return StalenessStatistics(
        mean=float(values.mean()),
        smallest=float(values.min()),
        largest=float(values.max()),
        oldest=oldest,
        newest=newest,
        spread=oldest - newest,
    )
