"""Attention in which every head has a sink: a learned score that takes part in the softmax but has no value.

A sink s turns weights exp(x - lse) into exp(x - total), with total = log(exp(lse) + exp(s)). So the output is that of
attention without sinks, times sigmoid(lse - s). FlashAttention's backward pass recomputes the weights from lse and uses
the output and its gradient only in their product: given the new output, and total for lse, it returns the right
gradients of query, key and value. The gradient of s is the sum over queries of -exp(s - total) (output . gradient).
In other dtypes than FlashAttention's the sink is one more column of scores.
Tests: tests/unit/backends/megatron/test_sink_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncrl.backends.kernels import flash
from asyncrl.backends.kernels.fused import fused
from asyncrl.backends.megatron.packed_attention import Piece, Pieces, visible, within_sequences
from asyncrl.backends.micro_batches import Rectangles


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    how: Rectangles | Pieces,
    *,
    window: int = 0,
) -> torch.Tensor:
    """See packed_attention.attention.  sinks: one per query head, [heads]"""
    return within_sequences(
        query,
        key,
        value,
        how,
        plain=partial(plain, sinks=sinks, window=window),
        varlen=partial(_varlen, sinks=sinks, window=window),
    )


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """query [B, heads, n, d], key and value [B, key-value heads, m, d] -> [B, heads, n, d], in float32 in between"""
    batch, groups, keys, size = key.shape
    queries = query.shape[2]
    grouped = query.reshape(batch, groups, -1, queries, size).float()
    scores = grouped @ key.float().transpose(-1, -2)[:, :, None] * size**-0.5
    seen = visible(queries, keys, window, query.device)
    if seen is None:
        seen = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    columns = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, columns], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value.float()[:, :, None]).flatten(1, 2).to(query.dtype)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, *, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and not flash.takes_fewer_key_heads(query.dtype):
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return with_sinks(query, key, value, sinks, Flash(piece=piece, window=window))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """torch's FlashAttention on runs of different lengths; see packed_attention.Piece.

    Its backward pass recomputes weights from ``lse`` f32[heads, n]: the logarithm of the sum of exp(scores) of a query.
    """

    piece: Piece
    window: int

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        operation = torch.ops.aten._flash_attention_forward
        out, lse, *_ = operation(query, key, value, *self._runs(), return_debug_mask=False, **self._window())
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        operation = torch.ops.aten._flash_attention_backward
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = operation(
            grad_out, query, key, value, out, lse, *self._runs(), *no_dropout, **self._window()
        )
        return gradients

    def _runs(self) -> tuple[Any, ...]:
        """Boundaries, longest runs, dropout, and whether a query sees everything before it, as torch's own calls."""
        piece = self.piece
        boundaries = piece.query_boundaries, piece.key_boundaries
        return *boundaries, piece.longest_query, piece.longest_key, 0.0, self.window == 0

    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.window - 1, "window_size_right": 0}


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Flash
) -> torch.Tensor:
    """query [n, heads, d], key and value [m, key-value heads, d] -> [n, heads, d]"""
    return _WithSinks.apply(query, key, value, sinks, kernel)  # type: ignore[no-any-return, no-untyped-call]


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Flash
    ) -> torch.Tensor:
        out, lse = kernel.forward(query, key, value)
        out = _damp(out, lse.t(), sinks)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, sinks, out, total = ctx.saved_tensors
        grad_inputs = ctx.kernel.backward(grad_out.contiguous(), query, key, value, out, total)
        grad_sinks = _grad_sinks(grad_out, out.detach(), total.t(), sinks.detach()) if ctx.needs_input_grad[3] else None
        return *grad_inputs, grad_sinks, None


@fused
def _damp(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """out [n, heads, d], lse f32[n, heads] -> the output with sinks"""
    return (out.float() * torch.sigmoid(lse - sinks.float())[..., None]).to(out.dtype)


@fused
def _grad_sinks(grad_out: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks, [heads]."""
    products = (grad_out.float() * out.float()).sum(-1)
    return -((sinks.float() - total).exp() * products).sum(0).to(sinks.dtype)
