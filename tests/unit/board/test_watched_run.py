"""Rows of a file that grows, is cut short, and has invalid lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.board.file_tail import RowTail
from asyncrl.board.watched_run import WatchedRun, row_of
from asyncrl.errors import ConfigError
from asyncrl.messages import StepMetrics


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
