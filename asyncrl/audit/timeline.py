"""The timeline of a recorded run: rows of timeline.jsonl, and evaluations of metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.errors import ConfigError
from asyncrl.messages.validation import MOST_SECONDS

TIMELINE_FILE: Final = "timeline.jsonl"
OLDER_FILE: Final = "timeline.1.jsonl"
EVALUATED_AT: Final = "evaluation/time"

_SHAPES: Final[Mapping[str, tuple[type, ...]]] = {
    "groups": (int, str, *(float,) * 5),
    "loads": (str, int, *(float,) * 3),
    "waits": (str, str, str, float),
}
"""Types of the items in a row."""


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows in the order of their steps; empty if none were recorded.

    For a step that a resumed learner trained again, only the last row is included. Raises ConfigError if the folder
    holds no run or cannot be read.
    """
    if not RecordedRun(directory).is_run:
        raise ConfigError(f"{directory}: holds no run")
    return _in_order(_bytes(directory / name) for name in (OLDER_FILE, TIMELINE_FILE))


def evaluations_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl for evaluated versions, in the order in which the evaluations ended."""
    rows = RecordedRun(directory).metrics().values()
    return sorted((row for row in rows if row.get(EVALUATED_AT)), key=lambda row: float(row[EVALUATED_AT]))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def newest_rows(directory: Path, *, most_bytes: int) -> list[dict[str, Any]]:
    """Return the last rows of timeline.jsonl and of the file before it; empty if none were recorded. Blocks."""
    return _in_order(_end(directory / name, most_bytes) for name in (OLDER_FILE, TIMELINE_FILE))


def _end(path: Path, most_bytes: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read(most_bytes)
    return b""


def _in_order(files: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rows of files by their steps; of several rows of a step, the last."""
    rows = {row["step"]: row for content in files for line in content.split(b"\n") if (row := _row(line)) is not None}
    return [rows[step] for step in sorted(rows)]


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None if it is incomplete."""
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
    """Whether a value has this type; float stands for any plausible number of seconds."""
    if kind is float:
        return type(value) in (int, float) and abs(value) <= MOST_SECONDS
    return type(value) is kind
