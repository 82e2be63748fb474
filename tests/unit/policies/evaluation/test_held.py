"""How many workers an evaluation holds back, and its share of the engines' time, computed by hand."""

from __future__ import annotations

import pytest

from asyncrl.policies.evaluation.held import EngineTime, num_held


@pytest.mark.parametrize(
    ("share", "workers", "held"),
    [(0.25, 8, 2), (0.25, 7, 1), (0.25, 4, 1), (0.5, 3, 1), (1.0, 3, 3), (0.25, 2, 1), (0.25, 0, 1)],
)
def test_no_more_than_the_share_is_held_but_one_at_least(share: float, workers: int, held: int) -> None:
    assert num_held(share, workers) == held


def test_each_worker_counts_from_when_it_had_the_version_until_the_end() -> None:
    time = EngineTime(began=100.0)
    time.heard("w0", held_seconds=3.0, now=105.0)  # since 102
    time.heard("w0", held_seconds=6.0, now=108.0)
    time.heard("w1", held_seconds=1.0, now=106.0)  # since 105
    assert time.share(num_engines=4, now=110.0) == (8.0 + 5.0) / (4 * 10.0)


def test_engines_that_nobody_heard_of_are_no_share_over_one() -> None:
    time = EngineTime(began=0.0)
    for name in ("w0", "w1", "w2"):
        time.heard(name, held_seconds=9.0, now=1.0)
    assert time.share(num_engines=1, now=2.0) == 1.0
    assert EngineTime(began=2.0).share(num_engines=1, now=2.0) == 0.0
