"""Curves and columns stay small, drop steps that were trained again, and lose nothing when they are summarized."""

from __future__ import annotations

import pytest

from asyncrl.board.run_state import MOST_COLUMNS, MOST_POINTS, Columns, Curve


def test_a_long_curve_gets_coarser_and_keeps_its_mean() -> None:
    curve = Curve()
    for step in range(1, 8 * MOST_POINTS + 1):
        curve.add(step, float(step))
        assert len(curve.steps) <= MOST_POINTS
    assert curve.stride == 8
    assert curve.steps == list(range(8, 8 * MOST_POINTS + 1, 8))
    assert sum(curve.values) / len(curve.values) == pytest.approx((8 * MOST_POINTS + 1) / 2)


def test_a_step_that_is_trained_again_replaces_what_came_after_it() -> None:
    curve, columns = Curve(), Columns()
    for step in (1, 2, 3, 4, 3):
        curve.add(step, 10.0 * step if curve.steps[-1:] != [4] else -1.0)
        columns.add(step, [step])
    assert (curve.steps, curve.values) == ([1, 2, 3], [10.0, 20.0, -1.0])
    assert (columns.steps, columns.counts) == ([1, 2, 3], [[1], [2], [3]])


@pytest.mark.parametrize("steps", [MOST_COLUMNS, MOST_COLUMNS + 1, 3 * MOST_COLUMNS + 7])
def test_columns_are_summed_and_nothing_is_left_out(steps: int) -> None:
    columns = Columns()
    for step in range(1, steps + 1):
        columns.add(step, [1] * (1 + step % 3))
        assert len(columns.steps) <= MOST_COLUMNS
    assert sum(map(sum, columns.counts)) == sum(1 + step % 3 for step in range(1, steps + 1))
    assert columns.steps == list(range(1, steps + 1, columns.stride))
