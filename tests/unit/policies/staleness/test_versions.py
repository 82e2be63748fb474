"""Staleness per token, including after a learner fell back."""

from __future__ import annotations

from asyncrl.policies.staleness.staleness import effective_version, oldest_version, per_token
from tests.harness.groups import span


def test_staleness_is_counted_per_token() -> None:
    ages = per_token((span(3), span(5, start=2)), length=4, policy_version=6, forks={})
    assert ages.tolist() == [3, 3, 1, 1]


def test_versions_of_a_lost_history_count_as_old_as_the_fork() -> None:
    # Incarnation 0 reached version 9; then the learner fell back to a checkpoint at 6 and started incarnation 1 there.
    forks = {1: 6}
    assert effective_version(span(9, epoch=0), forks) == 6
    assert effective_version(span(4, epoch=0), forks) == 4
    assert effective_version(span(9, epoch=1), forks) == 9
    assert oldest_version((span(9, epoch=0), span(8, start=2, epoch=1)), forks) == 6


def test_a_second_fall_back_counts_from_the_earlier_fork() -> None:
    assert effective_version(span(9, epoch=0), {1: 6, 2: 3}) == 3
