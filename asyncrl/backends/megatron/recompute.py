"""Selective recomputation: the backward pass recomputes cheap results instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from asyncrl.backends.kernels import fused


def recompute_selectively(
    config: Any, result: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: Any
) -> AbstractContextManager[Any]:
    """With selective recomputation, recompute ``result`` in the backward pass of the operations inside.

    Otherwise they keep it as usual.
    """
    if config.recompute_granularity != "selective" or not torch.is_grad_enabled():
        return nullcontext()
    return fused.recompute_in_backward(result, lambda: function(*arguments))
