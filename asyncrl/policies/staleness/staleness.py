"""How old a token is, including across a learner that fell back to an earlier checkpoint.

Staleness of a token = version being trained - version that sampled the token, at the step that trains on it.

A learner that resumes from version k starts a new incarnation. Tokens sampled after k by weights of an older
incarnation come from versions that were rolled back. They are good samples with known behavior logprobs, so
they are trained, and they count as old as the last version that both incarnations share: k. So a version
(incarnation i, v) counts as

    effective = min(v, resume point of every incarnation after i)        resume_points[j] = version from which j resumed

Staleness is measured against the effective version, and so is the bound. Test:
tests/unit/policies/staleness/test_staleness.py, test_rolled_back_versions_count_as_old_as_the_resume_point.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.messages import Trajectory, VersionSpan

ResumePoints = Mapping[int, int]
"""incarnation -> policy version from which it resumed. Incarnation 0 starts from 0 and may be left out."""


def effective_version(span: VersionSpan, resume_points: ResumePoints) -> int:
    """Return the newest version that was not rolled back and took part in sampling the span."""
    return min(
        [
            span.policy_version,
            *(resumed_from for incarnation, resumed_from in resume_points.items() if incarnation > span.incarnation),
        ]
    )


def is_rolled_back(version: tuple[int, int], resume_points: ResumePoints) -> bool:
    """Return whether a later incarnation resumed from before the version (incarnation, policy version)."""
    incarnation, policy_version = version
    return any(policy_version > resumed_from for later, resumed_from in resume_points.items() if later > incarnation)


def oldest_version(spans: Sequence[VersionSpan], resume_points: ResumePoints) -> int:
    return min(effective_version(span, resume_points) for span in spans)


def sampled_spans(trajectory: Trajectory) -> tuple[tuple[VersionSpan, int], ...]:
    """Return the version spans with tokens that the policy sampled, and the number of these tokens in each."""
    spans, mask = trajectory.version_spans, trajectory.response_mask
    ends = [span.start for span in spans[1:]] + [len(mask)]
    counts = [int(np.count_nonzero(mask[span.start : end])) for span, end in zip(spans, ends, strict=True)]
    return tuple((span, count) for span, count in zip(spans, counts, strict=True) if count)


def newest_version(trajectory: Trajectory, resume_points: ResumePoints) -> int:
    """Return the version of the newest sampled token; without one, the oldest version of the trajectory."""
    found = [effective_version(span, resume_points) for span, _ in sampled_spans(trajectory)]
    return max(found, default=oldest_version(trajectory.version_spans, resume_points))


def per_token(
    spans: Sequence[VersionSpan], *, length: int, policy_version: int, resume_points: ResumePoints
) -> NDArray[np.int32]:
    """Return the staleness of each of ``length`` tokens when ``policy_version`` is trained.  -> i32[length] >= 0

    A given answer counts as fresh if it was published at a rolled-back version, later than the version that trains it.
    """
    ends = [span.start for span in spans[1:]] + [length]
    staleness = np.empty(length, np.int32)
    for span, end in zip(spans, ends, strict=True):
        staleness[span.start : end] = max(0, policy_version - effective_version(span, resume_points))
    return staleness


# -- loss weights that fall with age -----------------------------------------------------------------------------------


def exponential_weight(staleness: ArrayLike, *, rate: float = 0.2) -> NDArray[np.float64]:
    """Return exp(-rate x staleness), in (0, 1].  i32[M] -> f64[M]

    The three age weights are our own; no framework ships one. They multiply the loss weights, so the gradient shrinks
    with staleness. They do not correct its direction.
    """
    weights: NDArray[np.float64] = np.exp(-rate * _age(staleness))
    return weights


def inverse_weight(staleness: ArrayLike) -> NDArray[np.float64]:
    """Return 1 / (1 + staleness), in (0, 1].  i32[M] -> f64[M]"""
    return 1.0 / (1.0 + _age(staleness))


def linear_weight(staleness: ArrayLike, *, max_staleness: int) -> NDArray[np.float64]:
    """Return 1 - staleness / (max_staleness + 1), at least 0; > 0 for all admitted tokens.  i32[M] -> f64[M]"""
    return np.maximum(0.0, 1.0 - _age(staleness) / (max_staleness + 1))


AgeWeight = Callable[[ArrayLike], NDArray[np.float64]]
"""From the staleness of tokens to the factors of their loss weights, i32[M] -> f64[M] in [0, 1]."""


def age_weight(name: str, *, rate: float, max_staleness: int) -> AgeWeight | None:
    """Return the weight called ``name``: exponential, inverse or linear; None for "". Raises KeyError for others."""
    if not name:
        return None
    weights: dict[str, AgeWeight] = {
        "exponential": functools.partial(exponential_weight, rate=rate),
        "inverse": inverse_weight,
        "linear": functools.partial(linear_weight, max_staleness=max_staleness),
    }
    return weights[name]


def _age(staleness: ArrayLike) -> NDArray[np.float64]:
    """Clip to >= 0: tokens of rolled-back versions may be newer than the version being trained, and count as fresh."""
    return np.maximum(np.asarray(staleness, np.float64), 0.0)


# -- where the staleness comes from ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Versions by which a group fell behind, while it was generated and while it waited to be trained."""

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        return self.in_flight + self.in_queue


def lag(*, policy_version: int, start: int, end: int) -> Lag:
    """Return the lag of a group generated from version ``start`` to ``end`` when ``policy_version`` is trained.

    prime-rl logs the same numbers; its step n trains version n - 1.
    """
    total = max(0, policy_version - start)
    in_flight = min(total, end - start)
    return Lag(in_flight=in_flight, in_queue=total - in_flight)


def is_stale(oldest: int, *, policy_version: int, max_staleness: int) -> bool:
    """Return whether a group whose oldest token has version ``oldest`` is too old to train. The bound is inclusive."""
    return policy_version - oldest > max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessStatistics:
    """Staleness of the tokens of several sequences.

    mean, smallest, largest  over all tokens
    oldest, newest, spread   per sequence, f64[S]: staleness of its oldest and its newest token, and the difference;
                             nan for a sequence without tokens
    """

    mean: float
    smallest: float
    largest: float
    oldest: NDArray[np.float64]
    newest: NDArray[np.float64]
    spread: NDArray[np.float64]


def statistics(staleness: ArrayLike, sequence: ArrayLike, *, num_sequences: int) -> StalenessStatistics:
    """Return the staleness statistics of a batch.  i32[M], i64[M] as in segments.py.  Raises ValueError if M is 0."""
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
