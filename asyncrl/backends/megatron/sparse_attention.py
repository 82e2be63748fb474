"""Attention in which an indexer has chosen the keys of each query (kernels/indexer.py), on packed rows.

All scores are computed and those of other keys masked, a piece of queries at a time, so attention takes the time of
dense attention and memory for one piece; the backward pass computes a piece again. Queries that could not see more keys
than are chosen attend as usual.
Tests: tests/unit/backends/megatron/test_sparse_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from asyncrl.backends.kernels.indexer import choose
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import Piece, Pieces, plain, within_sequences
from asyncrl.backends.megatron.process_groups import context_parallel_group
from asyncrl.backends.micro_batches import Rectangles

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

Choice = Sequence[torch.Tensor]
"""i32[B, c, most] for each rectangle, or run, of a row: the keys of its last c queries, numbered within it."""
_NUMBERS: Final = 2**28
"""Scores of a piece of queries, where no kernel avoids keeping them: 1 GiB in float32."""
_LEAST_QUERIES: Final = 128
"""Of a piece: kernels need work."""


@torch.no_grad()
def choose_keys(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, how: Rectangles | Pieces, *, most: int
) -> Choice:
    """Choose keys within each sequence.  queries [n, heads, d], weights f32[n, heads], keys [n, d] of a rank's part"""
    if isinstance(how, Rectangles):
        return [
            choose(queries[of_queries], weights[of_queries], keys[of_keys], most=most)
            for of_queries, of_keys in zip(how.indices, how.keys or how.indices, strict=True)
        ]
    if how.order is not None:
        keys = gather_from_sequence_parallel_region(keys, group=context_parallel_group()).index_select(0, how.order)
    if how.copies is not None:
        keys = keys.index_select(0, how.copies)
    return [
        choose(own[of_queries][None], own_weights[of_queries][None], own_keys[of_keys][None], most=most)
        for piece in how.pieces
        for own, own_weights, own_keys in [(queries[piece.queries], weights[piece.queries], keys[piece.keys])]
        for of_queries, of_keys in piece.runs
    ]


def sparse_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, choice: Choice, how: Rectangles | Pieces
) -> torch.Tensor:
    """See packed_attention.attention. A query and its keys have as many heads."""
    rest = iter(choice)

    def next_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, next(rest))

    def by_runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece) -> torch.Tensor:
        of_queries, of_keys = ([run.stop - run.start for run in runs] for runs in zip(*piece.runs, strict=True))
        runs = zip(*map(torch.split, (query, key, value), (of_queries, of_keys, of_keys)), strict=True)
        attended = [next_part(*(x.transpose(0, 1)[None] for x in run))[0] for run in runs]
        return torch.cat(attended, dim=1).transpose(0, 1)

    return within_sequences(query, key, value, how, plain=next_part, varlen=by_runs)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """query [B, heads, n, d], key and value [B, heads, m, d] -> [B, heads, n, d].  chosen: see Choice"""
    num_chosen = chosen.shape[1]
    if not num_chosen:
        return plain(query, key, value, window=0)
    others, seen = query.shape[2] - num_chosen, key.shape[2] - num_chosen
    last: torch.Tensor = _Chosen.apply(query[:, :, others:], key, value, chosen)  # type: ignore[no-untyped-call]
    if not others:
        return last
    first = plain(query[:, :, :others], key[:, :, :seen], value[:, :, :seen], window=0)
    return torch.cat([first, last], dim=2)


class _Chosen(torch.autograd.Function):
    """Attention of the last queries to their chosen keys, with the gradients of query, key and value."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, chosen)
        attended = torch.empty_like(query)
        for part, seen in _parts(query, key):
            attended[:, :, part] = _masked(query[:, :, part], key[:, :, seen], value[:, :, seen], chosen[:, part])
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, chosen = ctx.saved_tensors
        of_query = torch.empty_like(query)
        wide = torch.promote_types(key.dtype, torch.float32)
        of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for part, seen in _parts(query, key):
            q, k, v = (x.detach().requires_grad_() for x in (query[:, :, part], key[:, :, seen], value[:, :, seen]))
            with torch.enable_grad():
                attended = _masked(q, k, v, chosen[:, part])
            made = torch.autograd.grad(attended, (q, k, v), gradient[:, :, part])
            of_query[:, :, part] = made[0]
            of_key[:, :, seen] += made[1]
            of_value[:, :, seen] += made[2]
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None


def _parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of queries, and the keys up to the last of each."""
    batch, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    step = max(_LEAST_QUERIES, _NUMBERS // (batch * heads * num_keys))
    for start in range(0, num_queries, step):
        stop = min(num_queries, start + step)
        yield slice(start, stop), slice(0, num_keys - num_queries + stop)


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(*chosen.shape[:2], key.shape[2], dtype=torch.bool, device=query.device)
    mask = mask.scatter_(-1, chosen.long(), value=True)[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
