"""Logprob of one token and entropy of its distribution per row of logits, over a vocabulary that ranks may share.

One pass, float32 inside, in chunks of rows: beside the logits themselves memory holds a few numbers per row, and the
softmax is made again in the backward pass. Test: test_logprobs_and_entropy_over_a_split_vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_CHUNK_NUMBERS = 2**26
"""Logits turned to float32 at once: 256 MiB."""


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocabulary_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, V / ranks], targets i64[M] -> logprobs f32[M], entropy f32[M] (nats), both with gradient.

    Rank r of ``group`` holds columns [r V / ranks, (r + 1) V / ranks); columns from ``vocabulary_size`` on are padding
    and have no probability. The distribution is softmax(logits / temperature).
    """
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    start = rank * logits.shape[1]
    num_valid = min(vocabulary_size - start, logits.shape[1])
    return _TokenLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
        logits, targets - start, temperature, num_valid, group if ranks > 1 else None
    )


class _TokenLogprobs(torch.autograd.Function):
    """With x the scaled logits, Z = log sum exp x, p = exp(x - Z), m = sum p x: logprob = x[t] - Z, entropy = Z - m.

    d logprob / dx = onehot(t) - p;  d entropy / dx = p (m - x).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        num_valid: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_here = (targets >= 0) & (targets < num_valid)
        columns = torch.where(is_here, targets, 0)[:, None]
        results = []
        for rows in _chunks(logits):
            x = logits[rows, :num_valid].float() / temperature
            largest = _reduced(x.amax(dim=-1), dist.ReduceOp.MAX, group)
            exponentials = (x - largest[:, None]).exp()
            own = x.gather(-1, columns[rows])[:, 0] * is_here[rows]
            sums = torch.stack([exponentials.sum(-1), (exponentials * x).sum(-1), own])
            total, weighted, target = _reduced(sums, dist.ReduceOp.SUM, group)
            log_total = largest + total.log()
            results.append(torch.stack([target - log_total, log_total, weighted / total]))
        logprobs, log_total, mean = torch.cat(results, dim=1) if results else logits.new_zeros(3, 0).float()
        ctx.save_for_backward(logits, columns, is_here, log_total, mean)
        ctx.temperature, ctx.num_valid = temperature, num_valid
        ctx.set_materialize_grads(False)
        return logprobs, log_total - mean

    @staticmethod
    def backward(ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None) -> Any:
        logits, columns, is_here, log_total, mean = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for rows in _chunks(logits):
            x = logits[rows, : ctx.num_valid].float() / ctx.temperature
            p = (x - log_total[rows, None]).exp()
            part = torch.zeros_like(p)
            if of_logprobs is not None:
                part -= p * of_logprobs[rows, None]
                part.scatter_add_(-1, columns[rows], (of_logprobs[rows] * is_here[rows])[:, None])
            if of_entropy is not None:
                part += p * (mean[rows, None] - x) * of_entropy[rows, None]
            gradient[rows, : ctx.num_valid] = (part / ctx.temperature).to(logits.dtype)
        return gradient, None, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    step = max(1, _CHUNK_NUMBERS // logits.shape[1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _reduced(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(values, op=operation, group=group)
    return values
