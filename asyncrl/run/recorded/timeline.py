"""The timeline of a recorded run: rows of timeline.jsonl, or what metrics.jsonl says in their place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner.timeline import SECONDS
from asyncrl.errors import ConfigError
from asyncrl.messages.validation import MOST_SECONDS
from asyncrl.metrics.trace import from_metrics
from asyncrl.run.recorded.run_folder import RecordedRun

TIMELINE_FILE: Final = "timeline.jsonl"
OLDER_FILE: Final = "timeline.1.jsonl"
EVALUATED_AT: Final = "evaluation/time"

_SHAPES: Final[Mapping[str, tuple[type, ...]]] = {
    "groups": (int, str, *(float,) * 5),
    "loads": (str, int, *(float,) * 3),
    "waits": (str, str, str, float),
}
"""Of the items of a row."""


def rows_of(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows, in the order of their steps, and the file that they are of. Of a step that a resumed learner trained
    again, the last row. Raises ConfigError for a folder that holds no run, or that cannot be read."""
    recorded = RecordedRun(directory)
    if not recorded.is_run:
        raise ConfigError(f"{directory}: holds no run")
    rows: dict[int, dict[str, Any]] = {}
    for name in (OLDER_FILE, TIMELINE_FILE):
        for line in _bytes(directory / name).split(b"\n"):
            if (row := _row(line)) is not None:
                rows[row["step"]] = row
    if rows:
        return [rows[step] for step in sorted(rows)], TIMELINE_FILE
    said: list[str] = []
    metrics = {step: row for (_, step), row in sorted(recorded.metrics(say=said.append).items())}
    if said and not metrics:
        raise ConfigError(f"{directory}: {said[0]}")
    return [from_metrics(metrics[step], SECONDS) for step in sorted(metrics)], "metrics.jsonl"


def evaluations_of(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of versions that were evaluated, in the order in which the evaluations ended. None of
    a run of an older version, whose rows do not say when."""
    rows = [row for row in RecordedRun(directory).metrics().values() if _is_time(row.get(EVALUATED_AT))]
    return sorted(rows, key=lambda row: float(row[EVALUATED_AT]))


def _is_time(value: Any) -> bool:
    return isinstance(value, float | int) and value > 0


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


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
        is_whole = type(row["step"]) is int and _is(float, row["time"])
        is_whole = is_whole and all(_is(float, seconds) for seconds in row["seconds"].values())
        for name, shape in _SHAPES.items():
            items = [zip(shape, item, strict=True) for item in row[name]]
            is_whole = is_whole and all(_is(kind, value) for item in items for kind, value in item)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return row if is_whole else None


def _is(kind: type, value: Any) -> bool:
    """Whether it is of this kind: float is any number of seconds that can be."""
    if kind is float:
        return type(value) in (int, float) and abs(value) <= MOST_SECONDS
    return type(value) is kind
