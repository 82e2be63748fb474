"""Products with the weights of experts as engines have them in 4 bits, whose gradients train the whole weights.

The forward pass rounds, and the backward pass takes rounding for the identity (the straight-through estimator,
arXiv:1308.3432): the input's gradient is that of the rounded weights, and the weights get the gradient that the rounded
ones would get. Both passes round anew, so that no rounded copy is kept for the backward pass.
Tests: tests/unit/backends/kernels/test_rounded_experts.py, tests/unit/backends/megatron/test_fake_quantization.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.tensors import int4


def rounded_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, group: int) -> torch.Tensor:
    """x [N, in], sorted by expert; weights [experts, out, in]; rows of expert i end at ends[i], i32 -> [N, out]

    group: numbers of a row of the weights that share a scale; divides ``in``
    """
    return _RoundedProduct.apply(x, weights, ends, group)  # type: ignore[no-any-return, no-untyped-call]


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, group: int) -> torch.Tensor:
        ctx.save_for_backward(x, weights, ends)
        ctx.group = group
        return F.grouped_mm(x, int4.round_weights(weights, group=group).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        x, weights, ends = ctx.saved_tensors
        grad_out, grad_x, grad_weights = grad_out.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad_out, int4.round_weights(weights, group=ctx.group), offs=ends)
        if ctx.needs_input_grad[1]:
            grad_weights = F.grouped_mm(grad_out.t(), x, offs=ends) if len(x) else torch.zeros_like(weights)
        return grad_x, grad_weights, None, None
