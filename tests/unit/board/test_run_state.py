"""What a browser is shown of a run: curves, marks and lanes, kept up to date with bounded work."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.board.feed import MOST_ASKED, MOST_BROWSERS, MOST_WAITING, THREADS, Hub, Readers
from asyncrl.board.file_tail import RowTail
from asyncrl.board.run_state import MOST_COLUMNS, MOST_POINTS, Columns, Curve, Marks, RunState, is_curve
from asyncrl.board.watched_run import WatchedRun, row_of
from asyncrl.errors import ConfigError
from asyncrl.messages import StepMetrics
from asyncrl.policies.health.faults import Finding


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


def write(path: Path, *steps: int, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(json.dumps({"step": step}) for step in steps) + end)


def steps(tail: RowTail) -> list[int]:
    rows, _ = tail.read()
    return [row["step"] for row in rows]


def test_each_row_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RowTail(path)
    assert steps(tail) == []
    write(path, 1, 2)
    write(path, 3, end="")
    assert steps(tail) == [1, 2]
    write(path, end="\n")
    assert steps(tail) == [3]


def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RowTail(path)
    write(path, 1, 2, 3)
    assert steps(tail) == [1, 2, 3]
    path.write_text("")
    write(path, 1)
    assert steps(tail) == [1]


def test_step_metrics_from_the_bus_become_a_row() -> None:
    row = row_of(StepMetrics(step=3, numbers={"loss": 1.0}, staleness=(2, 1)))
    assert row == {"step": 3, "loss": 1.0, "staleness/histogram": {"edges": [0, 1, 2], "counts": [2, 1]}}


def test_folder_without_a_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"history\.jsonl"):
        WatchedRun(tmp_path, [], token="", verb="board")
    with pytest.raises(ConfigError, match="no such run folder"):
        WatchedRun(tmp_path / "none", [], token="", verb="board")


async def test_everybody_gets_what_is_new_in_one_piece() -> None:
    hub = Hub()
    one, other = hub.join(), hub.join()
    assert one is not None and other is not None
    hub.broadcast(0, {"kind": "rows"})
    hub.broadcast(1, {"kind": "marks"})
    expected = b'data: {"run":0,"kind":"rows"}\n\ndata: {"run":1,"kind":"marks"}\n\n'
    assert one.take() == other.take() == expected


async def test_slow_browser_reloads_the_state() -> None:
    hub = Hub()
    browser = hub.join()
    assert browser is not None
    for _ in range(MOST_WAITING + 1):
        hub.broadcast(0, {"kind": "rows"})
    assert browser.take() == b'data: {"kind":"restart"}\n\n'


async def test_browsers_are_bounded() -> None:
    hub = Hub()
    joined = [hub.join() for _ in range(MOST_BROWSERS)]
    assert hub.join() is None
    assert joined[0] is not None
    hub.leave(joined[0])
    assert hub.join() is not None
    await asyncio.sleep(0)


async def test_excess_requests_are_told_to_retry_without_blocking_others() -> None:
    readers, others = Readers("test"), Readers("others")
    gate, running, most = threading.Event(), 0, 0
    lock = threading.Lock()

    def read(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert gate.wait(60)
        with lock:
            running -= 1
        return number

    asked = [asyncio.ensure_future(readers.run(read, number)) for number in range(MOST_ASKED)]
    await asyncio.sleep(0)
    with pytest.raises(web.HTTPServiceUnavailable) as refused:
        await readers.run(read, MOST_ASKED)
    assert refused.value.headers["Retry-After"] == "2"
    assert await others.run(lambda: "read") == "read"
    assert await asyncio.to_thread(lambda: "read") == "read"
    gate.set()
    assert await asyncio.gather(*asked) == list(range(MOST_ASKED))
    assert most <= THREADS
    assert await readers.run(read, 7) == 7
    for each in (readers, others):
        each.close()


def test_the_summary_says_whether_the_run_is_healthy_and_the_numbers_to_watch() -> None:
    state = RunState("r")
    assert state.summary()["health"] == {"is_good": None, "why": "no step is trained yet", "numbers": []}
    state.add_rows([{"step": 1, "reward/mean": 0.1, "entropy": 2.0}, {"step": 2, "reward/mean": 0.4, "entropy": 1.5}])
    health = state.summary()["health"]
    assert (health["is_good"], health["why"]) == (True, "healthy: no fault and no alarm")
    assert [(one["title"], one["value"]) for one in health["numbers"]] == [
        ("reward", "0.4, was 0.1"),
        ("entropy", "1.5, was 2"),
    ]
    changes = state.update({}, findings=[ENGINE], status="up", now=1.0)
    (summary,) = (change for change in changes if change["kind"] == "summary")
    assert summary["health"]["why"].startswith("not healthy: w0's engine has not answered")
    state.update({}, findings=[], status="up", now=2.0)
    state.add_rows([{"step": 3, "reward/mean": 0.1, "alarm/reward_fell": 1.0}])
    assert "sees the reward fall far below its best" in state.summary()["health"]["why"]
    state.add_rows([{"step": 4, "reward/mean": 0.3}])
    assert state.summary()["health"]["why"].startswith(
        "no alarm now, but until step 3 the learner sees the reward fall"
    )
