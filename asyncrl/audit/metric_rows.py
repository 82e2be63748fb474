"""Rows of metrics.jsonl. Lines are parsed defensively: the file may have been edited or damaged on disk."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.policies.metric import Histogram, Metric

Row = dict[str, Any]

_OF_EVERY_ROW: Final = ("step", "learner/incarnation")


def parse(line: bytes) -> Row | None:
    """Parse a row; None if it has no step, or a number that is not finite (the learner writes null for those)."""
    try:
        row: Row = json.loads(line, parse_constant=_refuse)
        incarnation = row.get("learner/incarnation", 0)
        is_whole = type(row["step"]) is int and row["step"] >= 0 and _is_finite(incarnation) and incarnation >= 0
        return row if is_whole and all(map(_is_finite, row.values())) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def metrics_of(row: Row) -> dict[str, Metric]:
    """Return the metrics of a row, without its step, for a sink that is to write it again."""
    return {name: _metric(value) for name, value in row.items() if name != "step"}


def _metric(value: Any) -> Metric:
    if isinstance(value, Mapping):
        return Histogram(edges=tuple(value["edges"]), counts=tuple(value["counts"]))
    return math.nan if value is None else value  # null: it was not finite


def rows_of_newest_history(rows: Mapping[tuple[int, int], Row]) -> list[Row]:
    """Return one row per step, in order, of all rows by (incarnation, step).

    A resumed learner that trains a step replaces that row and all later ones of earlier learners. One that only
    evaluates the version from which it resumes trains nothing again: its metrics are added to the row of the step.
    """
    found: list[Row] = []
    for (_, step), row in sorted(rows.items()):
        place = bisect_left(found, step, key=lambda one: int(one["step"]))
        if not _is_only_evaluated(row):
            found[place:] = [row]
        elif place < len(found) and found[place]["step"] == step:
            found[place] = found[place] | {name: row[name] for name in row if name not in _OF_EVERY_ROW}
        else:
            found.insert(place, row)
    return found


def _is_only_evaluated(row: Row) -> bool:
    return all(name.startswith("evaluation/") or name in _OF_EVERY_ROW for name in row) and "evaluation/complete" in row


def _is_finite(value: Any) -> bool:
    """Whether a value is a finite number, or no number type. Raises OverflowError for an int too large for a float."""
    return not isinstance(value, float | int) or math.isfinite(value)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
