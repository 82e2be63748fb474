"""Rows that the policy solves nearly always or hardly ever are rested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.policies.groups.pass_rates import PassRates, state_problem

ROW, OTHER = (0, 3), (0, 4)


def rates(**settings: Any) -> PassRates:
    return PassRates(**({"low": 0.25, "high": 0.75} | settings))


def test_a_row_rests_for_a_pass_when_its_newest_group_was_too_easy_or_too_hard() -> None:
    seen = rates()
    for rewards, rests in (([1, 1, 1, 1], True), ([1, 1, 1, 0], False), ([1, 0, 0, 0], False), ([0, 0, 0, 0], True)):
        seen.see(ROW, epoch=2, rewards=rewards)
        assert [seen.rests(ROW, epoch=epoch) for epoch in (2, 3, 4)] == [rests, rests, False]
    assert not seen.rests(OTHER, epoch=2)


def test_a_row_rests_as_many_passes_as_asked_and_is_then_asked_again() -> None:
    seen = rates(rest=3)
    seen.see(ROW, epoch=0, rewards=[1, 1])
    assert [seen.rests(ROW, epoch=epoch) for epoch in range(5)] == [True, True, True, True, False]
    seen.see(ROW, epoch=4, rewards=[1, 0])
    assert not seen.rests(ROW, epoch=5)


def test_what_is_solved_is_said_by_the_run_file() -> None:
    seen = rates(solved_at=0.5)
    seen.see(ROW, epoch=0, rewards=[0.5, 0.9, 0.6, 0.49])
    assert seen.newest[ROW].share == 0.75 and not seen.rests(ROW, epoch=1)


def test_nothing_is_kept_where_no_row_may_rest() -> None:
    off = PassRates()
    off.see(ROW, epoch=0, rewards=[1.0])
    assert not off.is_on and off.newest == {} and off.state() == {} and off.metrics() == {}


def test_a_checkpoint_has_them_all() -> None:
    seen = rates()
    seen.see(ROW, epoch=1, rewards=[1, 1])
    seen.see(OTHER, epoch=2, rewards=[1, 0])
    seen.num_rested = 7
    state = json.loads(json.dumps(seen.state()))
    assert state_problem(state) == "" and state_problem({}) == ""
    again = rates()
    again.resume(state)
    assert again == seen
    off = PassRates()
    off.resume(state)
    assert off.newest == {}


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"rows": []},
        {"rows": {}, "num_rested": 0},
        {"rows": [[0, 1, 0.5]], "num_rested": 0},
        {"rows": [[0, 1, 1.5, 0]], "num_rested": 0},
        {"rows": [[0, 1, 0.5, -1]], "num_rested": 0},
        {"rows": [[0, 1, 0.5, 0]], "num_rested": -1},
    ],
    ids=str,
)
def test_a_state_that_none_could_have_saved_is_told(state: Any) -> None:
    assert state_problem(state)


def test_metrics_say_how_many_rows_are_too_easy_and_too_hard() -> None:
    seen = rates()
    for place, rewards in enumerate(([1, 1], [1, 1], [0, 0], [1, 0])):
        seen.see((0, place), epoch=0, rewards=rewards)
    assert seen.metrics() == {
        "curriculum/rows": 4.0,
        "curriculum/pass_rate": 0.625,  # (1 + 1 + 0 + 1/2) / 4
        "curriculum/too_hard": 0.25,
        "curriculum/too_easy": 0.5,
        "curriculum/rested": 0.0,
    }
