"""Sorts tokens by expert for a mixture, and back, using gathers only.

A token with k experts becomes k rows. Its result and its gradient are sums over these rows. On CUDA, scatter-adding
rows (index_add) takes ten times as long as gathering them.
Tests: tests/unit/backends/kernels/test_expert_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Positions of tokens among the experts' rows. Created without waiting for the device.

    order   i64[n k]: the choice (token x k + number) that each row belongs to
    places  i64[n, k]: the row of each choice
    counts  i64[experts]: rows of each expert
    """

    order: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def from_choices(cls, experts: torch.Tensor, num_experts: int) -> ExpertRows:
        """experts: i64[n, k], distinct for each token"""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).index_add_(
            0, flat, torch.ones_like(flat)
        )
        return cls(order=order, places=places.view(experts.shape), counts=counts)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n k, H]: copy each token to the rows of its experts."""
        return _Spread.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n k, H] -> [n, H]: sum the rows of each token."""
        return _Gathered.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def tokens(self) -> torch.Tensor:
        """i64[n k]: the token of each row"""
        return self.order // self.places.shape[1]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor) -> Any:
        return sums_of_rows(grad_rows, ctx.rows.places), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        ctx.rows = rows
        return sums_of_rows(x, rows.places)

    @staticmethod
    def backward(ctx: Any, grad_sums: torch.Tensor) -> Any:
        return grad_sums.index_select(0, ctx.rows.tokens), None


def sums_of_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [N, H], places i64[n, k] -> [n, H]: for each token the sum of its k rows, in float32"""
    if x.is_cuda:
        from asyncrl.backends.kernels import triton_expert_rows

        return triton_expert_rows.sums_of_rows(x, places)
    return plain_sums_of_rows(x, places)


def plain_sums_of_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    chosen = x.index_select(0, places.flatten()).view(*places.shape, x.shape[1])
    return chosen.sum(1, dtype=torch.float32).to(x.dtype)
