"""Causal attention within each document of a packed row.

In 16 bits on CUDA this is torch's variable-length FlashAttention; otherwise scaled_dot_product_attention over a few
rectangles of documents (micro_batches.Rectangles). Never synchronises with the device.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends.micro_batches import PackedRow, Rectangles


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """FlashAttention supports only 16-bit dtypes on CUDA."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """query [N, heads, d], key and value [N, key-value heads, d] -> [N, heads, d]; scores are scaled by 1 / sqrt(d)."""
    if row.layout is not None:
        return _rectangular(query, key, value, row.layout)
    return _varlen(query, key, value, row.boundaries, row.longest)


def _rectangular(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Rectangles) -> torch.Tensor:
    attended = []
    for indices in layout.indices:
        q, k, v = (x[indices].transpose(1, 2) for x in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[layout.order]


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, longest: int
) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and not _takes_fewer_key_heads(query.dtype):
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return _flash(query, key, value, boundaries, longest)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, longest: int
) -> torch.Tensor:
    """Options differ: torch 2.10 has is_causal, 2.11 window_size, 2.12 enable_gqa."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters()
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if query.shape[1] != key.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    attended: Any = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    return attended  # type: ignore[no-any-return]


@functools.cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def _takes_fewer_key_heads(dtype: torch.dtype) -> bool:
    """Whether FlashAttention supports grouped-query attention, forward and backward.

    The kernel does, but torch before 2.12 does not tell whether it exposes it, so compare with repeated heads.
    """
    random = torch.Generator("cuda").manual_seed(0)
    boundaries = torch.tensor([0, 48, 64], dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(64, heads, 64, device="cuda", dtype=dtype, generator=random).requires_grad_() for heads in (4, 2, 2)
    )
    results = []
    for repeats in (1, 2):
        with torch.enable_grad():
            try:
                keys, values = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
                out = _flash(query, keys, values, boundaries, 48)
                results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
            except (RuntimeError, ValueError):
                return False
    return all(torch.allclose(a, b, atol=5e-2, rtol=5e-2) for a, b in zip(*results, strict=True))
