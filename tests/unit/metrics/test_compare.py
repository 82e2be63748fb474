"""The differences between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.metrics.compare import difference
from asyncrl.state.history import HISTORY_FILE, History
from tests.harness.command import asyncrl

Rows = dict[int, dict[str, Any]]


def compared(a: Rows, b: Rows, **options: Any) -> Any:
    return difference(({}, {}), (a, b), ({}, {}), **options)


def test_the_first_step_whose_numbers_differ_is_found_by_metric() -> None:
    a: Rows = {step: {"step": step, "loss": 1.0, "reward/mean": 0.5, "time": step} for step in range(1, 5)}
    b: Rows = {step: {"step": step, "loss": 1.0 + (step > 2), "reward/mean": 0.5 + (step > 3)} for step in range(1, 6)}
    found = compared(a, b)
    assert (found.first, found.in_both, found.steps) == (3, 4, ((1, 4), (1, 5)))
    assert [(one.name, one.first, one.at_first, one.at_last) for one in found.metrics] == [
        ("loss", 3, (1.0, 2.0), (1.0, 2.0)),
        ("reward/mean", 4, (0.5, 1.5), (0.5, 1.5)),
    ]
    assert [one.name for one in compared(a, b, with_clocks=True).metrics] == ["time", "loss", "reward/mean"]


def test_a_number_that_one_lacks_differs_and_a_small_difference_may_be_none() -> None:
    a, b = {1: {"loss": 1.0, "kl": None}}, {1: {"loss": 1.001, "kl": 0.1}}
    assert {one.name for one in compared(a, b).metrics} == {"loss", "kl"}
    assert {one.name for one in compared(a, b, tolerance=0.01).metrics} == {"kl"}
    assert compared(a, a).is_none


def test_settings_and_batches_are_compared() -> None:
    settings = ({"run": {"name": "a", "steps": 3}, "x": {"y": {"z": 1}}}, {"run": {"name": "b", "steps": 3}})
    found = difference(settings, ({}, {}), ({1: [2, 1], 2: [3, 4]}, {1: [1, 2], 2: [3, 5]}))
    assert found.settings == {"x.y.z": (1, None)}
    assert found.batch == 2


def recorded(folder: Path, *, steps: int, rate: float, loss: float) -> Path:
    folder.mkdir()
    history = History(folder / HISTORY_FILE, incarnation=0)
    settings = {"model": {"path": "m"}, "data": {"path": "d"}, "learner": {"learning_rate": rate}}
    history.begin(step=0, kept=0, max_staleness=0, settings=settings)
    rows = []
    for step in range(1, steps + 1):
        history.trained([2 * step, 2 * step + 1], step=step, max_staleness=0)
        rows.append(json.dumps({"step": step, "loss": loss if step > 1 else 0.0, "learner/step_seconds": rate}))
    history.close()
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_the_command_says_where_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = recorded(tmp_path / "a", steps=3, rate=0.1, loss=1.0)
    b = recorded(tmp_path / "b", steps=4, rate=0.2, loss=2.0)
    code, out, err = asyncrl("diff", a, b, capsys=capsys)
    assert (code, err) == (1, "")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["settings"],
        ["learner.learning_rate", "0.1", "->", "0.2"],
        ["steps", "a", "has", "1", "to", "3,", "b", "has", "1", "to", "4"],
        ["batches", "the", "same", "groups", "at", "each", "step"],
        ["numbers", "differ", "from", "step", "2", "on"],
        ["metric", "first", "a", "b", "at", "step", "3", "b"],
        ["loss", "2", "1", "2", "1", "2"],
    ]
    code, out, _ = asyncrl("diff", a, a, "--json", capsys=capsys)
    assert (code, json.loads(out)["same"]) == (0, True)


def test_bad_input_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = recorded(tmp_path / "a", steps=1, rate=0.1, loss=1.0)
    for arguments, text in (((a, tmp_path), "holds no run"), ((a, a, "--tolerance", "2"), "--tolerance 2: must be in")):
        code, out, err = asyncrl("diff", *arguments, capsys=capsys)
        assert (code, out) == (2, "") and text in err and err.count("\n") == 1
