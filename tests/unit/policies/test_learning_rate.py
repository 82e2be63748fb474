"""Learning rate schedules, computed by hand."""

from __future__ import annotations

import pytest

from asyncrl.policies.learning_rate import Kind, Schedule


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2]),
    ],
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(kind: Kind, expected: list[float]) -> None:
    schedule = Schedule(kind=kind, peak=1.0, floor=0.2, warmup_steps=2, steps=6)
    assert [schedule.at(step) for step in range(1, 9)] == pytest.approx(expected)


def test_no_step_of_the_run_has_a_rate_of_zero() -> None:
    assert Schedule(kind="cosine", peak=1.0, steps=10).at(10) > 0.02


def test_what_older_run_files_say_means_what_it_meant() -> None:
    old = Schedule(peak=3.0, warmup_steps=3)
    assert [old.at(step) for step in (1, 2, 3, 4, 1000)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert Schedule(peak=3.0).at(1) == 3.0
