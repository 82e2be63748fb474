"""The timeline of a recorded run: rows of timeline.jsonl, or what metrics.jsonl says in their place."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner.timeline import SECONDS
from asyncrl.errors import ConfigError
from asyncrl.metrics.trace import from_metrics
from asyncrl.run.run_folder import RecordedRun

TIMELINE_FILE: Final = "timeline.jsonl"
OLDER_FILE: Final = "timeline.1.jsonl"

_LENGTHS: Final = {"groups": 7, "loads": 5, "waits": 4}


def rows_of(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows, in the order of their steps, and the file that they are of. Of a step that a resumed learner trained
    again, the last row. Raises ConfigError for a folder that holds no run."""
    recorded = RecordedRun(directory)
    if not recorded.is_run:
        raise ConfigError(f"{directory}: holds no run")
    rows: dict[int, dict[str, Any]] = {}
    for name in (OLDER_FILE, TIMELINE_FILE):
        with contextlib.suppress(FileNotFoundError):
            for line in (directory / name).read_bytes().split(b"\n"):
                if (row := _row(line)) is not None:
                    rows[row["step"]] = row
    if rows:
        return [rows[step] for step in sorted(rows)], TIMELINE_FILE
    metrics = {step: row for (_, step), row in sorted(recorded.metrics().items())}
    return [from_metrics(metrics[step], SECONDS) for step in sorted(metrics)], "metrics.jsonl"


def newest_rows(directory: Path, *, most_bytes: int) -> list[dict[str, Any]]:
    """The rows at the end of timeline.jsonl and of the file before it; none where none was recorded. Blocks."""
    rows: dict[int, dict[str, Any]] = {}
    for name in (OLDER_FILE, TIMELINE_FILE):
        with contextlib.suppress(OSError), (directory / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            for line in file.read(most_bytes).split(b"\n"):
                if (row := _row(line)) is not None:
                    rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def _row(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    try:
        row = json.loads(line)
        whole = type(row["step"]) is int and isinstance(row["time"], float | int) and isinstance(row["seconds"], dict)
        for name, length in _LENGTHS.items():
            whole = whole and all(len(item) == length for item in row[name])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return row if whole else None
