"""Inputs of attention on CUDA: one kernel, and one for its gradient. Both read and write each number once.

Imported only on CUDA, where torch includes Triton. A program processes tokens one at a time. The heads of a token form
a table of rows, each split into two halves because rotation pairs (i, i + d / 2). Computation is in float32.
Test: test_a_kernel_computes_what_the_plain_function_does, in Triton's interpreter.
"""

# Kernel arguments are Triton pointers and numbers, for which Triton has no type names.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_STEPS = 8
"""Tokens per program of the gradient: enough to keep the per-program parts of the weight gradient small."""


def heads(
    mixed: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    groups: int,
    size: int,
    eps: float,
    is_interleaved: bool = False,
    is_zero_centered: bool = False,
    query_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """See kernels.fused. Returns None for inputs that the kernel does not support.

    It needs the heads of a token to fit into a program's registers, rotation of whole heads in pairs (i, i + size / 2),
    plain weights or none, and unscaled queries.
    """
    is_plain = not is_interleaved and not is_zero_centered and query_scale == 1.0
    is_whole = size == 2 * cosines.shape[1] and (query_weight is None) == (key_weight is None)
    if not is_plain or not is_whole or not 0 < mixed.numel() <= 16_384 * mixed.shape[0]:
        return None
    return _Heads.apply(mixed, cosines, sines, query_weight, key_weight, groups, eps)  # type: ignore[no-any-return, no-untyped-call]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        groups: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, half = cosines.shape
        queries = mixed.shape[1] // (2 * half * groups) - 2
        query = mixed.new_empty(tokens, groups * queries, 2 * half)
        key, value = (mixed.new_empty(tokens, groups, 2 * half) for _ in range(2))
        shape = {"groups": groups, "queries": queries, "half": half, "eps": eps, "is_normed": query_weight is not None}
        shape |= {"rows": triton.next_power_of_2(groups * (queries + 2)), "columns": triton.next_power_of_2(half)}
        shape["num_warps"] = min(16, max(4, shape["rows"] * shape["columns"] // 512))
        weights = (query_weight, key_weight) if query_weight is not None else (mixed, mixed)
        _forward[(tokens,)](mixed, cosines, sines, *weights, query, key, value, **shape)
        ctx.save_for_backward(mixed, cosines, sines, *weights)
        ctx.shape = shape
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *of_heads: torch.Tensor) -> Any:
        mixed, cosines, sines, *weights = ctx.saved_tensors
        tokens, half = cosines.shape
        programs = triton.cdiv(tokens, _STEPS)
        grad_mixed = torch.empty_like(mixed)
        grad_weights = mixed.new_empty((programs, 2, 2 * half), dtype=torch.float32)
        _backward[(programs,)](
            mixed,
            cosines,
            sines,
            *weights,
            *(x.contiguous() for x in of_heads),
            grad_mixed,
            grad_weights,
            tokens,
            **ctx.shape,
            steps=_STEPS,
        )
        if not ctx.shape["is_normed"]:
            return grad_mixed, None, None, None, None, None, None
        grad_query_weight, grad_key_weight = grad_weights.sum(0).to(weights[0].dtype)
        return grad_mixed, None, None, grad_query_weight, grad_key_weight, None, None


@triton.jit
def _places(groups: tl.constexpr, queries: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """For one token: which rows are queries, keys and values, and where their first halves are in each tensor."""
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns)[None, :]
    group, slot = row // (queries + 2), row % (queries + 2)
    is_here = (row < groups * (queries + 2)) & (column < half)
    in_mixed = row * 2 * half + column
    in_query = (group * queries + slot) * 2 * half + column
    in_key = group * 2 * half + column
    return slot, is_here, in_mixed, in_query, in_key


@triton.jit
def _weight(query_weight, key_weight, slot, start, queries: tl.constexpr, half: tl.constexpr, columns: tl.constexpr):
    """Load one half of the weight of each row: that of queries or of keys."""
    column = tl.arange(0, columns)[None, :]
    grad_query = tl.load(query_weight + start + column, mask=column < half, other=0.0).to(tl.float32)
    grad_key = tl.load(key_weight + start + column, mask=column < half, other=0.0).to(tl.float32)
    return tl.where(slot < queries, grad_query, grad_key)


@triton.jit
def _scale(first, second, half: tl.constexpr, eps: tl.constexpr):
    """1 / root mean square of each row"""
    squares = tl.sum(first * first + second * second, axis=1)[:, None]
    return tl.rsqrt(squares / (2 * half) + eps)


@triton.jit
def _forward(
    mixed,
    cosines,
    sines,
    query_weight,
    key_weight,
    query,
    key,
    value,
    groups: tl.constexpr,
    queries: tl.constexpr,
    half: tl.constexpr,
    eps: tl.constexpr,
    is_normed: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot, is_here, in_mixed, in_query, in_key = _places(groups, queries, half, rows, columns)
    source = mixed + token * groups * (queries + 2) * 2 * half + in_mixed
    plain_first = tl.load(source, mask=is_here, other=0.0)
    plain_second = tl.load(source + half, mask=is_here, other=0.0)
    first, second = plain_first.to(tl.float32), plain_second.to(tl.float32)
    if is_normed:
        scale = _scale(first, second, half, eps)
        first = first * scale * _weight(query_weight, key_weight, slot, 0, queries, half, columns)
        second = second * scale * _weight(query_weight, key_weight, slot, half, queries, half, columns)
    column = tl.arange(0, columns)[None, :]
    cosine = tl.load(cosines + token * half + column, mask=column < half, other=0.0)
    sine = tl.load(sines + token * half + column, mask=column < half, other=0.0)
    turned_first = (first * cosine - second * sine).to(plain_first.dtype)
    turned_second = (second * cosine + first * sine).to(plain_first.dtype)
    is_query, is_key, is_value = is_here & (slot < queries), is_here & (slot == queries), is_here & (slot > queries)
    query += token * groups * queries * 2 * half + in_query
    tl.store(query, turned_first, mask=is_query)
    tl.store(query + half, turned_second, mask=is_query)
    key += token * groups * 2 * half + in_key
    tl.store(key, turned_first, mask=is_key)
    tl.store(key + half, turned_second, mask=is_key)
    value += token * groups * 2 * half + in_key
    tl.store(value, plain_first, mask=is_value)
    tl.store(value + half, plain_second, mask=is_value)


@triton.jit
def _backward(
    mixed,
    cosines,
    sines,
    query_weight,
    key_weight,
    grad_query,
    grad_key,
    grad_value,
    grad_mixed,
    grad_weights,
    tokens,
    groups: tl.constexpr,
    queries: tl.constexpr,
    half: tl.constexpr,
    eps: tl.constexpr,
    is_normed: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    steps: tl.constexpr,
):
    """With r = 1 / rms(x), h = r x, b the output gradient rotated back, g = b w:
    the gradient of x is r (g - h mean(g h)); the gradient of w is the sum of b h over rows and tokens.
    """
    slot, is_here, in_mixed, in_query, in_key = _places(groups, queries, half, rows, columns)
    is_query, is_key, is_value = is_here & (slot < queries), is_here & (slot == queries), is_here & (slot > queries)
    column = tl.arange(0, columns)[None, :]
    if is_normed:
        weight_first = _weight(query_weight, key_weight, slot, 0, queries, half, columns)
        weight_second = _weight(query_weight, key_weight, slot, half, queries, half, columns)
    query_first = tl.zeros((columns,), tl.float32)
    query_second = tl.zeros((columns,), tl.float32)
    key_first = tl.zeros((columns,), tl.float32)
    key_second = tl.zeros((columns,), tl.float32)
    for step in range(steps):
        token = tl.program_id(0).to(tl.int64) * steps + step
        is_token = token < tokens
        wide, narrow = token * groups * queries * 2 * half, token * groups * 2 * half
        first = tl.load(grad_query + wide + in_query, mask=is_query & is_token, other=0.0).to(tl.float32)
        first += tl.load(grad_key + narrow + in_key, mask=is_key & is_token, other=0.0).to(tl.float32)
        second = tl.load(grad_query + wide + in_query + half, mask=is_query & is_token, other=0.0).to(tl.float32)
        second += tl.load(grad_key + narrow + in_key + half, mask=is_key & is_token, other=0.0).to(tl.float32)
        is_angle = (column < half) & is_token
        cosine = tl.load(cosines + token * half + column, mask=is_angle, other=0.0)
        sine = tl.load(sines + token * half + column, mask=is_angle, other=0.0)
        back_first, back_second = first * cosine + second * sine, second * cosine - first * sine
        place = token * groups * (queries + 2) * 2 * half + in_mixed
        if is_normed:
            h_first = tl.load(mixed + place, mask=is_here & is_token, other=0.0).to(tl.float32)
            h_second = tl.load(mixed + place + half, mask=is_here & is_token, other=0.0).to(tl.float32)
            scale = _scale(h_first, h_second, half, eps)
            h_first, h_second = h_first * scale, h_second * scale
            by_first, by_second = back_first * h_first, back_second * h_second
            query_first += tl.sum(tl.where(is_query, by_first, 0.0), axis=0)
            query_second += tl.sum(tl.where(is_query, by_second, 0.0), axis=0)
            key_first += tl.sum(tl.where(is_key, by_first, 0.0), axis=0)
            key_second += tl.sum(tl.where(is_key, by_second, 0.0), axis=0)
            mean = tl.sum(by_first * weight_first + by_second * weight_second, axis=1)[:, None] / (2 * half)
            back_first = scale * (back_first * weight_first - h_first * mean)
            back_second = scale * (back_second * weight_second - h_second * mean)
        out_first = tl.load(grad_value + narrow + in_key, mask=is_value & is_token, other=0.0).to(tl.float32)
        out_second = tl.load(grad_value + narrow + in_key + half, mask=is_value & is_token, other=0.0).to(tl.float32)
        out_first = tl.where(is_value, out_first, back_first)
        out_second = tl.where(is_value, out_second, back_second)
        tl.store(grad_mixed + place, out_first.to(grad_mixed.dtype.element_ty), mask=is_here & is_token)
        tl.store(grad_mixed + place + half, out_second.to(grad_mixed.dtype.element_ty), mask=is_here & is_token)
    flat = tl.arange(0, columns)
    grad_weights += tl.program_id(0) * 4 * half
    tl.store(grad_weights + flat, query_first, mask=flat < half)
    tl.store(grad_weights + half + flat, query_second, mask=flat < half)
    tl.store(grad_weights + 2 * half + flat, key_first, mask=flat < half)
    tl.store(grad_weights + 3 * half + flat, key_second, mask=flat < half)
