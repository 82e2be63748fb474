"""Sums of chosen rows on CUDA, in one kernel that reads each chosen row once.

Imported only on CUDA, where torch includes Triton. A program computes one row of the result, in float32.
Test: test_a_kernel_computes_what_the_plain_function_does, in Triton's interpreter.
"""

# Kernel arguments are Triton pointers and numbers, for which Triton has no type names.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 2048


def sums_of_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """See kernels.expert_rows."""
    x, places = x.contiguous(), places.contiguous()
    (tokens, chosen), width = places.shape, x.shape[1]
    out = x.new_empty(tokens, width)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    if tokens:
        grid = (tokens, triton.cdiv(width, columns))
        _sum[grid](x, places, out, chosen=chosen, width=width, columns=columns, num_warps=max(1, columns // 256))
    return out


@triton.jit
def _sum(x, places, out, chosen: tl.constexpr, width: tl.constexpr, columns: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_here = column < width
    total = tl.zeros((columns,), tl.float32)
    for choice in range(chosen):
        row = tl.load(places + token * chosen + choice)
        total += tl.load(x + row * width + column, mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=is_here)
