"""Malformed rows of timeline.jsonl are left out, because the code that draws them relies on their shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.timeline import TIMELINE_FILE, newest_rows
from asyncrl.cli import main

GROUP, LOAD, WAIT = [12, "w0", 0.5, 1.0, 2, 0.1, 3.5], ["w0", 6, 1.5, 0.5, 0.1], ["w0", "prompts", "learner", 1.0]
ROW: dict[str, Any] = {
    **{"step": 7, "incarnation": 0, "time": 9.5, "seconds": {"wait": 0.1}},
    **{"groups": [GROUP], "loads": [LOAD], "waits": [WAIT]},
}


def rows(folder: Path, row: Any) -> int:
    (folder / TIMELINE_FILE).write_text(json.dumps(row) + "\n")
    return len(newest_rows(folder, most_bytes=2**20))


def test_reads_a_whole_row(tmp_path: Path) -> None:
    assert rows(tmp_path, ROW) == 1
    assert rows(tmp_path, ROW | {"groups": [], "loads": [], "waits": []}) == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "7"}, {"step": 1.0}, {"time": None}, {"time": float("nan")}, {"time": 10**400}),
        *({"seconds": []}, {"seconds": {"wait": "x"}}, {"seconds": {"wait": float("inf")}}),
        *({"groups": None}, {"groups": [GROUP[:6]]}, {"groups": [[*GROUP[:6], "x"]]}, {"groups": [["12", *GROUP[1:]]]}),
        *({"loads": [3]}, {"loads": [[0, *LOAD[1:]]]}, {"waits": [["w0", "prompts", None, 1.0]]}, {"waits": {"a": 1}}),
    ],
)
def test_skips_rows_of_another_shape(change: dict[str, Any], tmp_path: Path) -> None:
    assert rows(tmp_path, ROW | change) == 0


@pytest.mark.parametrize("name", [TIMELINE_FILE, "metrics.jsonl"])
def test_unreadable_file_is_one_line_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).mkdir()
    assert main.main(["trace", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{name}" in told and "cannot be read: Is a directory" in told
    assert len(told.splitlines()) == 1
