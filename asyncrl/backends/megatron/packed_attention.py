"""Causal attention within each sequence of a packed row. A rank may hold only a part of the row.

In 16 bits on CUDA this uses FlashAttention (kernels/flash.py). Otherwise it uses scaled_dot_product_attention,
over a few rectangles of sequences (micro_batches.Rectangles) or sequence by sequence. Never synchronises with the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import flash
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.process_groups import context_parallel_group
from asyncrl.backends.megatron.shared_prefixes import copied
from asyncrl.backends.micro_batches import Rectangles

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(flash.Runs):
    """Consecutive queries and the keys that they see, as runs within one sequence each.

    queries, keys  slices of the rank's queries, and of the row's keys; keys begin with the first query's sequence
    runs           the boundaries as slices on the host, for attention that takes one run at a time
    """

    queries: slice
    keys: slice
    runs: Sequence[tuple[slice, slice]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All of a rank's queries, in order.

    order   i64[N]: position of each token of the row in the concatenated parts of all context-parallel ranks; None if
            one rank has the whole row
    copies  i64[K]: the row's token that each key is, if sequences share tokens; None: keys are the row's tokens
    """

    pieces: Sequence[Piece]
    order: torch.Tensor | None = None
    copies: torch.Tensor | None = None


Plain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Piece], torch.Tensor]
"""Attention of a query, key and value; see ``within_sequences``."""


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
    return within_sequences(
        query, key, value, how, plain=partial(plain, window=window), varlen=partial(flash.attention, window=window)
    )


def within_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    how: Rectangles | Pieces,
    *,
    plain: Plain,
    varlen: Varlen,
) -> torch.Tensor:
    """Call ``plain`` or ``varlen`` on the parts of a row, [n, heads, d] each, and join what they return.

    plain   query [B, heads, n, d], key and value [B, key-value heads, m, d] -> [B, heads, n, d]
    varlen  the same for the runs of a piece, [n, heads, d], where FlashAttention can be used
    """
    if isinstance(how, Rectangles):
        rectangles = [
            plain(*(x[i].transpose(1, 2) for x, i in ((query, queries), (key, keys), (value, keys))))
            for queries, keys in zip(how.indices, how.keys or how.indices, strict=True)
        ]
        return torch.cat([one.transpose(1, 2).flatten(0, 1) for one in rectangles])[how.order]
    if how.order is not None:
        key, value = _of_the_row(key, value, how.order)
    attended = []
    for piece in how.pieces:
        q = _cut(query, piece.queries)
        with _keys_of(piece, key, value, how.copies) as (k, v):
            if uses_varlen(query.device, query.dtype):
                attended.append(varlen(q, k, v, piece))
                continue
            for queries, keys in piece.runs:
                run = plain(*(x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys])))
                attended.append(run[0].transpose(0, 1))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _keys_of(
    piece: Piece, key: torch.Tensor, value: torch.Tensor, copies: torch.Tensor | None
) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
    """Return the piece's keys and values for the operations inside."""
    if copies is not None:
        return copied(key, value, copies[piece.keys])
    return nullcontext((_cut(key, piece.keys), _cut(value, piece.keys)))


def _cut(x: torch.Tensor, part: slice) -> torch.Tensor:
    """Return x[part]. Autograd copies the gradient of a slice into zeros, even if the slice is all of x."""
    return x if part == slice(0, len(x)) else x[part]


def _of_the_row(key: torch.Tensor, value: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the whole row in one collective. The backward pass sums the gradients of all ranks."""
    size = key[0].numel()
    both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    gathered = gather_from_sequence_parallel_region(both, group=context_parallel_group())
    return (
        gathered[:, :size].index_select(0, order).unflatten(1, key.shape[1:]),
        gathered[:, size:].index_select(0, order).unflatten(1, value.shape[1:]),
    )


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int) -> torch.Tensor:
    """query [B, heads, n, d], key and value [B, key-value heads, m, d] -> [B, heads, n, d]"""
    mask = visible(query.shape[2], key.shape[2], window, query.device)
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def visible(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return bool[queries, keys], what each of the last queries sees; None for plain causal attention in a square."""
    earlier = keys - queries
    is_local = 0 < window < keys
    if earlier == 0 and not is_local:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(earlier)
    return mask.triu(earlier - window + 1) if is_local else mask
