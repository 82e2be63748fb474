"""Checks that messages make of their own fields on construction. They raise MessageError, which names the field."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from asyncrl.errors import MessageError

LARGEST_KEY: Final = 200
"""Characters on the bus of a name that is a key there, where what is no letter, digit, - or _ takes three a byte. A key
has 256, and an event's key has more than the name."""

MOST_SECONDS: Final = 1e11
"""Three thousand years."""


def length_on_bus(name: str) -> int:
    """Characters of a name as a key on the bus."""
    return sum(
        1 if chr(byte).isalnum() and byte < 128 or byte in b"-_" else 3 for byte in name.encode(errors="replace")
    )


def name_problem(name: str) -> str:
    """Why a worker cannot have this name; "" when it can. It is a key on the bus and stands in events and logs."""
    if length_on_bus(name) > LARGEST_KEY:
        return (
            f"a worker's name may have {LARGEST_KEY} letters, digits, - and _ (others count three a byte), "
            f"{name[:20]!r}... has {length_on_bus(name)}"
        )
    return "" if name.isprintable() else f"a worker's name must be printable, got {name[:40]!r}"


def counts(message: Any, *names: str) -> None:
    """Check that the fields are in 0 <= n < 2^53, so that sums of them stay exact."""
    for name in names:
        value = getattr(message, name)
        if not 0 <= value < 2**53:
            raise MessageError(f"{name} must be >= 0 and < 2^53, got {value}")


def times(message: Any, *names: str) -> None:
    """Check that the fields are seconds that can be: no NaN, and what is computed from them stays finite."""
    for name in names:
        value = getattr(message, name)
        if not abs(value) <= MOST_SECONDS:
            raise MessageError(f"{name} must be seconds between -{MOST_SECONDS:g} and {MOST_SECONDS:g}, got {value}")


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)


def array(message: Any, name: str, dtype: Any) -> None:
    """Check that the field is a one-dimensional array of ``dtype``; a list becomes one, for readable tests."""
    value = getattr(message, name)
    if not isinstance(value, np.ndarray):
        value = np.asarray(value, dtype=dtype)
        object.__setattr__(message, name, value)
    if value.ndim != 1 or value.dtype != dtype:  # the text is not built for valid arrays
        raise MessageError(f"{name} must have one dimension of {np.dtype(dtype)}, has {value.ndim} of {value.dtype}")


def replace(message: Any, **changes: Any) -> Any:
    """A copy of a message with some fields changed, checked again."""
    return dataclasses.replace(message, **changes)
