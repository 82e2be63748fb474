"""Checks of a message's own fields on construction. They raise MessageError, which names the field."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from asyncrl.errors import MessageError

LARGEST_KEY: Final = 200
"""Most characters of a name that is a key on the bus. Each byte that is not a letter, digit, - or _ takes three. A key
may have 256 characters, and an event's key is longer than the name."""

MOST_SECONDS: Final = 1e11
"""About three thousand years."""


def length_on_bus(name: str) -> int:
    """Return the number of characters of a name as a key on the bus."""
    return sum(
        1 if chr(byte).isalnum() and byte < 128 or byte in b"-_" else 3 for byte in name.encode(errors="replace")
    )


def name_problem(name: str) -> str:
    """Why a worker cannot have this name; "" if it can. The name is a key on the bus and appears in events and logs."""
    if length_on_bus(name) > LARGEST_KEY:
        return (
            f"a worker's name may have {LARGEST_KEY} letters, digits, - and _ (others count three a byte), "
            f"{name[:20]!r}... has {length_on_bus(name)}"
        )
    is_one_part = name.isprintable() and "/" not in name
    return "" if is_one_part else f"a worker's name must be printable and without /, got {name[:40]!r}"


def check_counts(message: Any, *names: str) -> None:
    """Check that the fields are in 0 <= n < 2^53, so that their sums stay exact."""
    for name in names:
        value = getattr(message, name)
        if not 0 <= value < 2**53:
            raise MessageError(f"{name} must be >= 0 and < 2^53, got {value}")


def check_seconds(message: Any, *names: str) -> None:
    """Check that the fields are plausible seconds: not NaN, and small enough that results stay finite."""
    for name in names:
        value = getattr(message, name)
        if not abs(value) <= MOST_SECONDS:
            raise MessageError(f"{name} must be seconds between -{MOST_SECONDS:g} and {MOST_SECONDS:g}, got {value}")


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)


def check_array(message: Any, name: str, dtype: Any) -> None:
    """Check that the field is a one-dimensional array of ``dtype``. A list is converted, for readable tests."""
    value = getattr(message, name)
    if not isinstance(value, np.ndarray):
        value = np.asarray(value, dtype=dtype)
        object.__setattr__(message, name, value)
    if value.ndim != 1 or value.dtype != dtype:  # builds the error text only for an invalid array
        raise MessageError(f"{name} must have one dimension of {np.dtype(dtype)}, has {value.ndim} of {value.dtype}")


def replace(message: Any, **changes: Any) -> Any:
    """Return a copy of a message with some fields changed. The copy is checked again."""
    return dataclasses.replace(message, **changes)
