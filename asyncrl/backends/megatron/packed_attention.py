"""Causal attention within each document of a packed row. A rank may hold only a part of the row.

In 16 bits on CUDA this uses FlashAttention (kernels/flash.py). Otherwise it uses scaled_dot_product_attention,
over a few rectangles of documents (micro_batches.Rectangles) or document by document. Never synchronises with the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import flash
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.process_groups import context_parallel_group
from asyncrl.backends.micro_batches import Rectangles

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive queries and the keys that they see, as runs within one document each.

    queries, keys  slices of the rank's queries, and of the row's keys; keys begin with the first query's document
    query_boundaries, key_boundaries  i32[runs + 1]: run r is [boundaries[r], boundaries[r + 1]) of the slice
    longest_query, longest_key  tokens of the longest run
    runs           the boundaries as slices on the host, for attention without variable-length support

    A run's last query is at its last key. If a run has fewer queries than keys, the two are aligned at their ends.
    """

    queries: slice
    keys: slice
    query_boundaries: torch.Tensor
    key_boundaries: torch.Tensor
    longest_query: int
    longest_key: int
    runs: Sequence[tuple[slice, slice]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All of a rank's queries, in order.

    order  i64[N]: position of each token of the row in the concatenated parts of all context-parallel ranks; None if
           one rank has the whole row
    """

    pieces: Sequence[Piece]
    order: torch.Tensor | None = None


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether variable-length FlashAttention can be used: it supports only 16-bit dtypes on CUDA."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Rectangles | Pieces, *, window: int = 0
) -> torch.Tensor:
    """query [n, heads, d], key and value [n, key-value heads, d] of a rank's part -> [n, heads, d].

    Scores are scaled by 1 / sqrt(d).
    window: most tokens that a query sees, itself and those before it; 0 for all tokens before it
    """
    if isinstance(how, Rectangles):
        return _rectangular(query, key, value, how, window)
    if how.order is not None:
        key, value = of_the_row(key, value, how.order)
    attend = _varlen if uses_varlen(query.device, query.dtype) else _by_run
    attended = [attend(query[p.queries], key[p.keys], value[p.keys], p, window) for p in how.pieces]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def of_the_row(key: torch.Tensor, value: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the whole row in one collective. The backward pass sums the gradients of all ranks."""
    size = key[0].numel()
    both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    gathered = gather_from_sequence_parallel_region(both, group=context_parallel_group())
    return (
        gathered[:, :size].index_select(0, order).unflatten(1, key.shape[1:]),
        gathered[:, size:].index_select(0, order).unflatten(1, value.shape[1:]),
    )


def _by_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, window: int) -> torch.Tensor:
    attended = []
    for queries, keys in piece.runs:
        q, k, v = (x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys]))
        mask = visible(q.shape[2], k.shape[2], window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


def visible(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return bool[queries, keys], what each of the last queries sees; None for plain causal attention in a square."""
    earlier = keys - queries
    is_local = 0 < window < keys
    if earlier == 0 and not is_local:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(earlier)
    return mask.triu(earlier - window + 1) if is_local else mask


def _rectangular(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Rectangles, window: int
) -> torch.Tensor:
    attended = []
    for indices in layout.indices:
        q, k, v = (x[indices].transpose(1, 2) for x in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        mask = visible(q.shape[2], k.shape[2], window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[layout.order]


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, window: int) -> torch.Tensor:
    return flash.attention(
        query,
        key,
        value,
        query_boundaries=piece.query_boundaries,
        key_boundaries=piece.key_boundaries,
        longest_query=piece.longest_query,
        longest_key=piece.longest_key,
        window=window,
    )
