"""How old a token is, also across a learner that fell back to an earlier checkpoint.

Staleness of a token = version being trained - version that sampled it, at the step that trains on it.

When a learner resumes from version k it starts a new run epoch. Tokens that weights of an older epoch sampled after k
come from a history the learner no longer has. They are good samples with known behavior logprobs, so they are trained,
and count as old as the last version both histories share: k. So a version (epoch e, v) is worth

    effective = min(v, fork of every epoch after e)        fork[e'] = version from which epoch e' started

and staleness is measured against that. The bound holds for effective versions (tests/test_policies.py,
test_versions_of_a_lost_history_count_as_old_as_the_fork).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import VersionSpan

Forks = Mapping[int, int]
"""run epoch -> policy version from which it started. Epoch 0 starts from 0 and need not be in it."""


def effective_version(span: VersionSpan, forks: Forks) -> int:
    """The newest version of the present history that had a part in sampling the span."""
    return min([span.policy_version, *(version for epoch, version in forks.items() if epoch > span.run_epoch)])


def oldest_version(spans: Sequence[VersionSpan], forks: Forks) -> int:
    return min(effective_version(span, forks) for span in spans)


def per_token(spans: Sequence[VersionSpan], *, length: int, policy_version: int, forks: Forks) -> NDArray[np.int32]:
    """Staleness of each of ``length`` tokens when version ``policy_version`` is trained.  -> i32[length]"""
    ends = [span.start for span in spans[1:]] + [length]
    staleness = np.empty(length, np.int32)
    for span, end in zip(spans, ends, strict=True):
        staleness[span.start : end] = policy_version - effective_version(span, forks)
    return staleness
