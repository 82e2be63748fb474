"""RMSNorm on CUDA: one kernel, and one for its gradient. Both read and write each number once.

Imported only on CUDA, where torch includes Triton. A program of the forward pass processes one row. A program of the
backward pass processes several rows, and sums its part of the weight gradient in registers. Computation is in float32.
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
"""Rows per program of the gradient."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool = False) -> torch.Tensor | None:
    """See kernels.fused. Returns None unless rows fit into registers and the weight has the same dtype."""
    if x.shape[-1] > 16_384 or x.dtype != weight.dtype or x.numel() == 0:
        return None
    return _RmsNorm.apply(x, weight, eps, is_zero_centered)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, is_centered: bool) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        columns = triton.next_power_of_2(width)
        ctx.shape = {"width": width, "columns": columns, "num_warps": min(16, max(1, columns // 256))}
        ctx.shape["centered"] = is_centered
        out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        _forward[(rows,)](x, weight, out, scales, eps, **ctx.shape)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        x, weight, scales = ctx.saved_tensors
        rows = scales.shape[0]
        programs = triton.cdiv(rows, _STEPS)
        grad_x = torch.empty_like(x)
        grad_weights = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
        inputs = (grad_out.contiguous(), x, weight, scales)
        _backward[(programs,)](*inputs, grad_x, grad_weights, rows, **ctx.shape, steps=_STEPS)
        return grad_x, grad_weights.sum(0).to(weight.dtype), None, None


@triton.jit
def _forward(x, weight, out, scales, eps, width: tl.constexpr, columns: tl.constexpr, centered: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    is_here = column < width
    plain = tl.load(x + row * width + column, mask=is_here, other=0.0)
    wide = plain.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = wide * scale
    factor = tl.load(weight + column, mask=is_here, other=0.0).to(tl.float32)
    if centered:
        factor += 1.0
    else:
        normed = normed.to(plain.dtype).to(tl.float32)
    tl.store(out + row * width + column, (normed * factor).to(plain.dtype), mask=is_here)
    tl.store(scales + row, scale)


@triton.jit
def _backward(
    grad_out,
    x,
    weight,
    scales,
    grad_x,
    grad_weights,
    rows,
    width: tl.constexpr,
    columns: tl.constexpr,
    centered: tl.constexpr,
    steps: tl.constexpr,
):
    """With r = 1 / rms(x), h = r x, b the output gradient, g = b x weight (or 1 + weight):
    the gradient of x is r (g - h mean(g h)); the gradient of the weight is the sum of b h over rows.
    """
    column = tl.arange(0, columns)
    is_here = column < width
    factor = tl.load(weight + column, mask=is_here, other=0.0).to(tl.float32)
    if centered:
        factor += 1.0
    total = tl.zeros((columns,), tl.float32)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) * steps + step
        is_in = is_here & (row < rows)
        place = row * width + column
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normed = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32) * scale
        slope = tl.load(grad_out + place, mask=is_in, other=0.0).to(tl.float32)
        total += slope * normed
        slope *= factor
        mean = tl.sum(slope * normed, axis=0) / width
        tl.store(grad_x + place, (scale * (slope - normed * mean)).to(grad_x.dtype.element_ty), mask=is_in)
    tl.store(grad_weights + tl.program_id(0) * width + column, total, mask=is_here)
