"""A module ``__getattr__`` that returns, for any name, a function that raises when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def missing(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torchvision's {name} is not available on this machine")

    return call
