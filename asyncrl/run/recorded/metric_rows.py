"""Parses lines of metrics.jsonl defensively: the file may have been edited or damaged on disk."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl.errors import MessageError
from asyncrl.messages import upgrade

Row = dict[str, Any]


def parsed(line: bytes) -> Row | None:
    """Parse a row; None if it has no step, or a number that is not finite (the learner writes null for those)."""
    try:
        row = upgrade.metrics(json.loads(line, parse_constant=_refused))
        incarnation = row.get("learner/incarnation", 0)
        is_whole = type(row["step"]) is int and row["step"] >= 0 and _is_finite(incarnation) and incarnation >= 0
        return row if is_whole and all(map(_is_finite, row.values())) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MessageError):
        return None


def _is_finite(value: Any) -> bool:
    """Whether a value is a finite number, or no number type. Raises OverflowError for an int too large for a float."""
    return not isinstance(value, float | int) or math.isfinite(value)


def _refused(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
