"""What messages check of their own fields when they are built. Raises MessageError, which names the field."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.errors import MessageError


def counts(message: Any, *names: str) -> None:
    """The fields are whole numbers that other numbers can be added to without surprise: 0 <= n < 2^53."""
    for name in names:
        value = getattr(message, name)
        if not 0 <= value < 2**53:
            raise MessageError(f"{name} must be >= 0 and < 2^53, got {value}")


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)


def array(message: Any, name: str, dtype: Any) -> None:
    """The field is a one-dimensional array of ``dtype``; lists are taken too, for readable tests."""
    value = getattr(message, name)
    if not isinstance(value, np.ndarray):
        value = np.asarray(value, dtype=dtype)
        object.__setattr__(message, name, value)
    if value.ndim != 1 or value.dtype != dtype:  # no text is built for the many arrays that are right
        raise MessageError(f"{name} must have one dimension of {np.dtype(dtype)}, has {value.ndim} of {value.dtype}")
