"""The state of a run that browsers receive."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.board.run_state import RunState, is_curve


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


def test_numbers_of_the_run_are_curves() -> None:
    assert is_curve("evaluation/sums/mean@8", 0.5)
    assert not is_curve("rollout/w0/running", 1.0)
    assert not is_curve("weights/a/b/version", 1.0)
    assert not is_curve("loss", None)
    assert not is_curve("loss", math.inf)


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
