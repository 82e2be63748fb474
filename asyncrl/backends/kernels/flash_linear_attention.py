"""Kernels of the package flash-linear-attention for linear attention on CUDA. The only file that imports it.

The package is optional: without it, delta_rule.py computes the same in plain torch.
Test: test_linear_attention_in_kernels_is_that_in_plain_torch, on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("asyncrl.kernels")


@functools.cache
def is_installed() -> bool:
    """Return whether the package can be imported, and log once that it cannot."""
    try:
        _functions()
    except Exception as error:  # with another Triton than its own, its import may raise anything
        log.warning("linear attention runs in plain torch, without the kernels of flash-linear-attention: %s", error)
        return False
    return True


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    with warnings.catch_warnings():  # where warnings are errors, those of its import must not make it unusable
        warnings.simplefilter("ignore")
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule, causal_conv1d


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step: torch.Tensor,
    boundaries: torch.Tensor,
    host_boundaries: torch.Tensor,
) -> torch.Tensor:
    """See delta_rule.gated_delta_rule; in 16 bits.  boundaries: i64[D + 1] on the device, and on the host"""
    rule, _ = _functions()
    repeats = value.shape[1] // key.shape[1]
    if repeats > 1:  # older versions take no fewer keys than values
        query, key = (x.repeat_interleave(repeats, dim=1) for x in (query, key))
    rows = (x.contiguous()[None] for x in (query, key, value, log_decay, step))
    options = _boundaries(rule, boundaries, host_boundaries)
    result: torch.Tensor = rule(*rows, use_qk_l2norm_in_kernel=True, **options)[0]
    return result[0]


def short_convolution(
    x: torch.Tensor, kernels: torch.Tensor, boundaries: torch.Tensor, host_boundaries: torch.Tensor
) -> torch.Tensor:
    """See delta_rule.short_convolution."""
    _, convolve = _functions()
    options = _boundaries(convolve, boundaries, host_boundaries)
    result: torch.Tensor = convolve(x[None], kernels[:, 0].contiguous(), activation="silu", **options)[0]
    return result[0]


def _boundaries(function: Any, boundaries: torch.Tensor, host_boundaries: torch.Tensor) -> dict[str, torch.Tensor]:
    """Newer versions take a copy on the host, and then do not wait for the device."""
    options = {"cu_seqlens": boundaries}
    if "cu_seqlens_cpu" in inspect.signature(function).parameters:
        options["cu_seqlens_cpu"] = host_boundaries
    return options
