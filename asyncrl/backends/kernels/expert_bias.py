"""Adds the bias of each row's expert to rows that are sorted by expert, without waiting for the device.

The gradient of a bias is a sum over the rows of its expert. A grouped matrix product with a narrow matrix computes it:
scatter-adding rows takes many times as long on CUDA (kernels/expert_rows.py).
Test: tests/unit/backends/kernels/test_expert_rows.py.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

_NARROW: Final = 8
"""Columns of the narrow matrix: 16 bytes in 16 bits, the least that the kernels take."""


def with_bias(
    x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """x [N, H], bias [experts, H]; rows of expert i end at ends[i], i32 -> x plus the bias of each row's expert.

    scores: f32[N], a factor of each row's bias
    """
    ones = torch.ones(len(x), device=x.device) if scores is None else scores
    return _WithBias.apply(x, bias, ends, ones)  # type: ignore[no-any-return, no-untyped-call]


class _WithBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(bias, ends, scores)
        return torch.addcmul(x, _of_rows(bias, ends, len(x)), scores[:, None].to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        bias, ends, scores = ctx.saved_tensors
        grad_bias = grad_scores = None
        if ctx.needs_input_grad[1]:
            grad_bias = _sums_by_expert(grad_out, scores, ends) if len(grad_out) else torch.zeros_like(bias)
        if ctx.needs_input_grad[3]:
            grad_scores = (grad_out * _of_rows(bias, ends, len(grad_out))).sum(-1, dtype=torch.float32)
        return grad_out, grad_bias, None, grad_scores


def _sums_by_expert(x: torch.Tensor, scores: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [N, H], N > 0 -> sums of each expert's rows, multiplied by their scores, [experts, H]"""
    narrow = scores.to(x.dtype)[:, None].repeat(1, _NARROW)
    return F.grouped_mm(narrow.t(), x.contiguous(), offs=ends)[:, 0]


def _of_rows(bias: torch.Tensor, ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bias of each row's expert, [rows, H]."""
    experts = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
    return bias.index_select(0, experts)
