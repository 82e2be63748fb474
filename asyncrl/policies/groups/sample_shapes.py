"""Checks for the values of a recorded sample read from JSON, because the file may have been edited."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Shape = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    return type(value) is int


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def or_none(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def each(shape: Shape) -> Shape:
    return lambda value: isinstance(value, tuple) and all(map(shape, value))


def rows(*shapes: Shape) -> Shape:
    def fits(row: Any) -> bool:
        is_row = isinstance(row, tuple) and len(row) == len(shapes)
        return is_row and all(shape(value) for shape, value in zip(shapes, row, strict=True))

    return each(fits)
