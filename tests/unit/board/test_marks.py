"""Faults, restarts and events on the timeline."""

from __future__ import annotations

from asyncrl.board.run_state import Marks
from asyncrl.policies.health.faults import Finding

ENGINE = Finding(fault="engine", actor="w0", cause="w0's engine has not answered", remedy="see its log", seconds=7.0)


def test_a_fault_has_a_begin_and_an_end() -> None:
    marks = Marks()
    (mark,) = marks.faults([ENGINE], now=100.0)
    assert (mark["time"], mark["until"], mark["actor"], mark["remedy"]) == (93.0, None, "w0", "see its log")
    assert marks.faults([ENGINE], now=102.0) == []
    (over,) = marks.faults([], now=104.0)
    assert over["until"] == 104.0
    assert len(marks.all) == 1


def test_restarted_learner_is_shown_as_a_restart() -> None:
    marks = Marks()
    rows = [
        {"step": step, "time": float(step), "learner/incarnation": number} for step, number in ((1, 0), (2, 0), (2, 1))
    ]
    found = [mark for row in rows for mark in marks.row(row)]
    assert [mark["text"] for mark in found] == ["incarnation 1 goes on with step 2"]
