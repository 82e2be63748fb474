"""Estimates, from n answers to one prompt, of a model that would be asked k times. Pure.

An answer is solved or not. With c of n answers solved, every subset of k answers is equally likely, so the share of
matching subsets is an unbiased estimate of the probability for k fresh answers:

    pass@k     at least one of k is solved     1 - C(n - c, k) / C(n, k)      arXiv:2107.03374, equation 1
    pass^k     all k are solved                    C(c, k) / C(n, k)          arXiv:2406.12045, section 3
    majority@n the most frequent of the n answers is solved

Tests: tests/unit/policies/test_evaluation.py, against every subset enumerated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that at least one of k answers is solved.

    0 <= num_solved <= num_samples, 1 <= k <= num_samples
    """
    _check(num_samples, num_solved, k)
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_all_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that all of k answers are solved (pass^k)."""
    _check(num_samples, num_solved, k)
    return math.comb(num_solved, k) / math.comb(num_samples, k)


def majority(votes: Sequence[str], solved: Sequence[bool]) -> float:
    """Return whether the most frequent answer is solved, in [0, 1].

    votes  the normalized answer of each sample; "" for an answer without a vote. Without any vote the result is 0

    Ties are averaged: each of the most frequent answers is equally likely to be chosen. If a reward judged equal
    answers differently, the answer counts by its solved share.
    """
    ballots: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, is_solved in zip(votes, solved, strict=True):
        if vote:
            ballots[vote].append(is_solved)
    if not ballots:
        return 0.0
    most = max(map(len, ballots.values()))
    winners = [sum(ballot) / len(ballot) for ballot in ballots.values() if len(ballot) == most]
    return sum(winners) / len(winners)


def counts_of_k(num_samples: int) -> list[int]:
    """Return the k that are reported for n answers: 1, 2, 4, ... and n itself."""
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def _check(num_samples: int, num_solved: int, k: int) -> None:
    if not (0 <= num_solved <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"k = {k} of {num_samples} answers, {num_solved} of them solved, is impossible")
