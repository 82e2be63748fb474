"""The output layer: token logprobs and entropies from hidden states, without materialising all logits.

The logits of a whole micro-batch would be the largest tensor of all (16k rows of 152k: 5 GB in 16 bits, twice that in
float32). So rows are processed in chunks: a matrix product, then a few float32 numbers per row. The backward pass turns
the logits of each chunk into gradients immediately. It recomputes the logits, which is a third more work in this layer;
optionally, the logits of the first chunks are kept instead.
Tests: test_logprobs_and_entropy_over_a_split_vocabulary, test_logits_that_are_kept_give_the_same_gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.support import exclude

_CHUNK_NUMBERS = {"cuda": 2**29, "cpu": 2**26}
"""Logits per chunk: 1 GiB in 16 bits; on a CPU 256 MiB in float32, because float32 operations are not fused there."""

_KEPT_NUMBERS = {"cuda": 3 * 2**30, "cpu": 2**26}
"""Logits to keep for the backward pass, if requested: 6 GiB in 16 bits."""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    vocabulary_size: int,
    group: dist.ProcessGroup | None = None,
    keeps_logits: bool = False,
    support: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [M, H], weight [V / ranks, H], targets i64[M] -> logprobs f32[M], entropy f32[M] (nats), with gradient.

    The distribution is softmax(hidden weight^T / temperature) over the ``support`` (Distribution in micro_batches.py);
    ``temperature`` may be f32[M, 1]. Rank r of ``group`` holds rows [r V / ranks,
    (r + 1) V / ranks) of the weight; rows from ``vocabulary_size`` on are padding with zero probability. Every rank
    has the same hidden states; their gradient is summed over the ranks.
    """
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    start = rank * weight.shape[0]
    num_valid = min(vocabulary_size - start, weight.shape[0])
    is_here = (targets >= start) & (targets < start + num_valid)
    columns = torch.where(is_here, targets - start, -1)
    return _LinearLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, weight, columns, temperature, num_valid, group if ranks > 1 else None, keeps_logits, start, support
    )


class _LinearLogprobs(torch.autograd.Function):
    """With x the scaled logits, Z = log sum exp x, p = exp(x - Z), m = sum p x: logprob = x[t] - Z, entropy = Z - m.

    d logprob / dx = onehot(t) - p;  d entropy / dx = p (m - x).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        columns: torch.Tensor,
        temperature: float | torch.Tensor,
        num_valid: int,
        group: dist.ProcessGroup | None,
        keeps_logits: bool,
        start: int,
        support: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        valid = weight[:num_valid].t()
        statistics = hidden.new_empty((4, hidden.shape[0]), dtype=torch.float32)
        left = _KEPT_NUMBERS[hidden.device.type] if keeps_logits and any(ctx.needs_input_grad) else 0
        ctx.kept = {}
        for rows in _chunks(hidden, num_valid, is_cut=support is not None):
            logits = _logits(hidden, valid, rows, start=start, support=support)
            statistics[:, rows] = fused.row_statistics(logits, columns[rows], _of(temperature, rows))
            left -= logits.numel()
            if left >= 0:
                ctx.kept[rows.start] = logits
            del logits  # before the next chunk is computed
        logprobs, log_total, mean = _normalize(statistics, group)
        ctx.save_for_backward(hidden, weight, columns, log_total, mean)
        ctx.temperature, ctx.num_valid, ctx.group = temperature, num_valid, group
        ctx.start, ctx.support = start, support
        ctx.set_materialize_grads(False)
        return logprobs, log_total - mean

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, columns, log_total, mean = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_total)
        valid = weight[: ctx.num_valid]
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # a frozen output layer needs neither the product nor the memory
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        for rows in _chunks(hidden, ctx.num_valid, is_cut=ctx.support is not None):
            per_row = (columns[rows], log_total[rows], grad_logprobs[rows], _of(ctx.temperature, rows))
            logits = ctx.kept.pop(rows.start, None)
            if logits is None:
                logits = _logits(hidden, valid.t(), rows, start=ctx.start, support=ctx.support)
            if grad_entropy is None:
                grad_logits = fused.logits_gradient(logits, *per_row)
            else:
                grad_logits = fused.logits_gradient_with_entropy(logits, *per_row, mean[rows], grad_entropy[rows])
            del logits
            grad_hidden[rows] = grad_logits @ valid
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.num_valid], grad_logits.t(), hidden[rows])
            del grad_logits  # before the next logits are computed
        if ctx.group is not None:
            grad_hidden = _reduce(grad_hidden, dist.ReduceOp.SUM, ctx.group)
        weight_gradient = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, weight_gradient, None, None, None, None, None, None, None


def _logits(
    hidden: torch.Tensor,
    valid: torch.Tensor,
    rows: slice,
    *,
    start: int,
    support: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Logits [rows, V / ranks] over the support.  start: token of the first column"""
    logits = hidden[rows] @ valid
    return logits if support is None else exclude(logits, *support, first_row=rows.start, first_token=start)


def _of(temperature: float | torch.Tensor, rows: slice) -> float | torch.Tensor:
    return temperature[rows] if isinstance(temperature, torch.Tensor) else temperature


def _normalize(
    statistics: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row statistics f32[4, M] of each rank's columns -> logprob, Z and m over all columns, f32[M] each."""
    largest, total, weighted, own = statistics
    if group is not None:
        local, largest = largest, _reduce(largest.clone(), dist.ReduceOp.MAX, group)
        scale = (local - largest).exp()
        total, weighted, own = _reduce(torch.stack([total * scale, weighted * scale, own]), dist.ReduceOp.SUM, group)
    log_total = largest + total.log()
    return own - log_total, log_total, weighted / total


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total f32 += left x right, without rounding the product to 16 bits."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total += left @ right
    elif _adds_to_float32(left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)


@functools.cache
def _adds_to_float32(dtype: torch.dtype) -> bool:
    """Whether CUDA's addmm can add a 16-bit product to float32 in place; this differs between torch versions."""
    total, ones = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all())


def _chunks(hidden: torch.Tensor, width: int, *, is_cut: bool = False) -> Iterator[slice]:
    """Split the rows into equal parts, each small enough for its logits to stay below the limit.

    is_cut  half of it, because a byte per logit says which are outside the support
    """
    rows, width = hidden.shape[0], 2 * width if is_cut else width
    parts = -(-rows * width // _CHUNK_NUMBERS["cuda" if hidden.is_cuda else "cpu"])
    step = -(-rows // max(1, parts))
    for start in range(0, rows, max(1, step)):
        yield slice(start, start + step)


def _reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(values, op=operation, group=group)
    return values
