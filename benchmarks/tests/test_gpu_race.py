"""What benchmarks.gpu.peers.race reads off a peer's run, and asks of it."""

from __future__ import annotations

import pytest

from benchmarks.gpu.peers.race_window import measure, of_slime, windows
from benchmarks.gpu.peers.slime_run import words

STEPS = [{"time": 10.0 * (step + 1), "tokens": 100, "counts": [0, 60, 0, 40]} for step in range(6)]
LOOKS = [(10.0, 4, 0), (20.0, 0, 2), (25.0, 4, 0), (30.0, 4, 0)]


def test_a_step_of_slime_ends_where_the_next_begins_and_its_tokens_are_as_old_as_versions_sent_since() -> None:
    begun = [{"time": 5.0, "step": 0}, {"time": 9.0, "step": 1}, {"time": 14.0, "step": 2}]
    collected = [{"step": 0, "parts": {"1": 50}}, {"step": 1, "parts": {"1": 20, "2": 30}}]
    assert of_slime(begun, collected) == [
        {"time": 9.0, "tokens": 50, "counts": [50]},
        {"time": 14.0, "tokens": 50, "counts": [30, 20]},
    ]


def test_windows_follow_each_other_and_end_with_a_step() -> None:
    assert windows(STEPS, warmup=1, seconds=15.0, number=2) == (True, [(0, 2), (2, 4)])
    assert windows(STEPS, warmup=1, seconds=15.0, number=3) == (False, [(0, 2), (2, 4)])
    assert windows([], warmup=1, seconds=15.0, number=1) == (False, [])


def test_a_window_counts_the_steps_behind_its_first_end() -> None:
    row = measure(STEPS[:3], LOOKS, bound=2)
    assert (row["tokens_per_second"], row["steps"], row["step_seconds"]) == (10.0, 2, 10.0)
    assert (row["staleness_mean"], row["staleness_max"]) == (pytest.approx(1.8), 3)
    assert row["tokens_over_bound_share"] == pytest.approx(0.4)
    assert row["engine_at_zero"] == pytest.approx(0.25)


def test_true_is_a_flag_of_a_peers_command_and_false_is_none() -> None:
    given = {"a": True, "b": False, "c": 0, "d": 1, "e": ["x", "y"]}
    assert words(given) == ["--a", "--c", "0", "--d", "1", "--e", "x", "y"]
