"""One line of metrics.jsonl, as whoever reads it may rely on it: somebody may have edited it, and disks flip bits."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl.errors import MessageError
from asyncrl.messages import upgrade

Row = dict[str, Any]


def parsed(line: bytes) -> Row | None:
    """None for a line that is no row: without a step, or with a number that is none (a row has null in its place)."""
    try:
        row = upgrade.metrics(json.loads(line, parse_constant=_refused))
        incarnation = row.get("learner/incarnation", 0)
        is_whole = type(row["step"]) is int and row["step"] >= 0 and _is_finite(incarnation) and incarnation >= 0
        return row if is_whole and all(map(_is_finite, row.values())) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MessageError):
        return None


def _is_finite(value: Any) -> bool:
    """Or no number at all. Raises OverflowError for a whole number too large for a float."""
    return not isinstance(value, float | int) or math.isfinite(value)


def _refused(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
