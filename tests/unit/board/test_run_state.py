"""The state of a run that browsers receive."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl.board.lanes import Doing
from asyncrl.board.run_state import MOST_CURVES, MOST_ROWS, RunState, is_curve
from asyncrl.messages import Heartbeat


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward/mean": step / 10,
        "staleness/histogram": {"edges": [0, 1, 2], "counts": [3, 1]},
    } | more


def kinds(changes: list[dict[str, Any]]) -> list[str]:
    return [change["kind"] for change in changes]


def test_curves_leave_out_metrics_of_single_workers() -> None:
    changes = RunState("r").add_rows([row(1, **{"rollout/w0/running": 3.0, "rollout/running": 3.0, "kl": math.nan})])
    assert kinds(changes) == ["rows", "summary"]
    (told,) = changes[0]["rows"]
    assert told == {
        "step": 1,
        "reward/mean": 0.1,
        "rollout/running": 3.0,
        "histograms": {"staleness/histogram": [3, 1]},
    }


def test_many_new_rows_make_browsers_reload_the_curves() -> None:
    state = RunState("r")
    assert kinds(state.add_rows([row(step) for step in range(MOST_ROWS + 1)])) == ["reload", "summary"]
    assert state.curves_named(["reward/mean", "no such"])["reward/mean"][0] == list(range(MOST_ROWS + 1))


def test_curves_are_bounded() -> None:
    state = RunState("r")
    state.add_rows([row(1, **{f"reward/part{number}": 1.0 for number in range(2 * MOST_CURVES)})])
    assert len(state.curves) == MOST_CURVES


def test_numbers_of_the_run_are_curves() -> None:
    assert is_curve("evaluation/sums/mean@8", 0.5)
    assert not is_curve("rollout/w0/running", 1.0)
    assert not is_curve("weights/a/b/version", 1.0)
    assert not is_curve("loss", None)
    assert not is_curve("loss", math.inf)


def test_lanes_stay_when_the_run_goes_away() -> None:
    state = RunState("r")
    state.steps = 1
    beat = Heartbeat(actor="w0", role="rollout-worker", life="a")
    told = state.hear({"w0": (beat, Doing("generating"))}, findings=(), status="up", now=1.0)
    assert kinds(told) == ["lanes", "summary"]
    assert told[0]["totals"] == {"generating": 1}
    state.add_rows([row(1)])
    assert kinds(state.is_away("", now=2.0)) == ["lanes", "summary"]
    assert state.is_away("", now=3.0) == []
    assert state.status == "done"
    assert state.lanes_as_json()["source"] == "heartbeats"
    json.dumps(state.overview(), allow_nan=False)


def test_an_evaluation_leaves_the_curves_of_steps_as_they_are() -> None:
    state = RunState("r")
    state.add_rows([row(step, **{"learner/incarnation": 0.0}) for step in range(1, 11)])
    evaluated = {"step": 4, "evaluation/complete": 1.0, "learner/incarnation": 0.0}
    changes = state.add_rows([evaluated])
    assert state.curves["learner/incarnation"].steps == list(range(1, 11))
    assert "learner/incarnation" not in changes[0]["rows"][0]


def test_an_evaluation_is_a_row_of_its_own_step() -> None:
    state = RunState("r")
    state.add_rows([row(4), row(5)])
    evaluated = {
        "step": 2,
        "evaluation/complete": 1.0,
        "evaluation/sums/mean@8": 0.5,
        "evaluation/sums/mean@8/low": 0.4,
    }
    changes = state.add_rows([evaluated, row(6)])
    assert changes[0]["rows"][0]["evaluation/sums/mean@8"] == 0.5
    assert state.curves["reward/mean"].steps == [4, 5, 6]
    assert state.curves["evaluation/sums/mean@8"].steps == [2]
    assert state.summary()["last"]["step"] == 6


def test_the_ranks_of_a_learner_that_is_up_have_its_state() -> None:
    state = RunState("r")
    state.add_rows([row(1, **{"learner/rank0/tokens": 5.0, "learner/rank1/tokens": 3.0})])
    assert "learner/rank1/tokens" not in state.curves
    beat = Heartbeat(actor="learner", role="learner", life="a")
    learner = {"learner": (beat, Doing("training", "a step"))}
    state.hear(learner, findings=(), status="up", now=100.0)
    lanes = state.lanes_as_json()["lanes"]
    assert [lane["name"] for lane in lanes] == ["learner", "learner rank 1"]
    assert lanes[0]["segments"] == lanes[1]["segments"]
    again = {"learner": (Heartbeat(actor="learner", role="learner", life="b"), Doing("starting"))}
    state.hear(again, findings=(), status="up", now=101.0)
    assert [mark["actor"] for mark in state.marks.all] == ["learner"]  # one restart
