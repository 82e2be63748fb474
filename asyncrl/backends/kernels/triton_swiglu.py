"""SwiGLU on CUDA, with or without a score for each row: one kernel, and one for its gradient.

Imported only on CUDA, where torch includes Triton. A program processes one row, some columns at a time. Computation is
in float32.
Test: test_a_kernel_computes_what_the_plain_function_does, in Triton's interpreter.
"""

# Kernel arguments are Triton pointers and numbers, for which Triton has no type names.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def swiglu(x: torch.Tensor) -> torch.Tensor | None:
    """See kernels.fused. Returns None if there are no rows, because an empty grid cannot be launched."""
    return None if x.numel() == 0 else _Swiglu.apply(x, None)  # type: ignore[no-untyped-call]


def scored_swiglu(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | None:
    """See kernels.fused. Returns None if there are no rows."""
    return None if x.numel() == 0 else _Swiglu.apply(x, scores)  # type: ignore[no-untyped-call]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        x = x.contiguous()
        half = x.shape[-1] // 2
        columns = min(_COLUMNS, triton.next_power_of_2(half))
        ctx.shape = {"half": half, "columns": columns, "is_scored": scores is not None}
        ctx.shape["num_warps"] = max(1, columns // 256)
        out = x.new_empty((*x.shape[:-1], half))
        kept = (x,) if scores is None else (x, scores.contiguous())
        _forward[(out.numel() // half,)](x, kept[-1], out, **ctx.shape)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        x, *scores = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_scores = torch.empty_like(scores[0]) if scores else None
        rows = x.numel() // x.shape[-1]
        inputs = (x, scores[0] if scores else x, grad_out.contiguous())
        _backward[(rows,)](*inputs, grad_x, grad_x if grad_scores is None else grad_scores, **ctx.shape)
        return grad_x, grad_scores


@triton.jit
def _forward(x, scores, out, half: tl.constexpr, columns: tl.constexpr, is_scored: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row).to(tl.float32) if is_scored else 1.0
    for start in range(0, half, columns):
        column = start + tl.arange(0, columns)
        is_here = column < half
        gate = tl.load(x + row * 2 * half + column, mask=is_here, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * half + half + column, mask=is_here, other=0.0).to(tl.float32)
        gated = gate * tl.sigmoid(gate) * up * score
        tl.store(out + row * half + column, gated.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _backward(
    x, scores, grad_out, grad_x, grad_scores, half: tl.constexpr, columns: tl.constexpr, is_scored: tl.constexpr
):
    """With s = sigmoid(gate), g = output gradient x score:
    the gradient of gate is g up s (1 + gate (1 - s)); the gradient of up is g gate s.
    """
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row).to(tl.float32) if is_scored else 1.0
    total = tl.zeros((columns,), tl.float32)
    for start in range(0, half, columns):
        column = start + tl.arange(0, columns)
        is_here = column < half
        gate = tl.load(x + row * 2 * half + column, mask=is_here, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * half + half + column, mask=is_here, other=0.0).to(tl.float32)
        slope = tl.load(grad_out + row * half + column, mask=is_here, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        if is_scored:
            total += slope * gate * sigmoid * up
        slope *= score
        grad_gate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
        place = grad_x + row * 2 * half + column
        tl.store(place, grad_gate.to(grad_x.dtype.element_ty), mask=is_here)
        tl.store(place + half, (slope * gate * sigmoid).to(grad_x.dtype.element_ty), mask=is_here)
    if is_scored:
        tl.store(grad_scores + row, tl.sum(total, axis=0))
