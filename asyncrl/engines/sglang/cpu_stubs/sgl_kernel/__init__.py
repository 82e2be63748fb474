"""Stand-in for sgl_kernel. Without its kernels SGLang's CPU backend runs plain torch; what it still imports by name
belongs to speculative decoding, KV-cache moves, GPTQ and Mamba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

    missing.__name__ = name
    return missing
