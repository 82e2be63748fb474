"""Stand-in for sgl_kernel. Without its kernels, SGLang's CPU backend runs plain torch. The names that SGLang still
imports belong to speculative decoding, KV-cache moves, GPTQ and Mamba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

    missing.__name__ = name
    return missing


def _without_pinning() -> None:
    """Make torch ignore pin_memory. Adapters request pinned memory, which torch refuses without an accelerator."""

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


if not torch.accelerator.is_available():
    _without_pinning()
