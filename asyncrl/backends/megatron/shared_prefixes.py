"""Attention where sequences of a row begin with tokens that are computed once (policies/batching/prefixes.py).

A sequence has queries only for its own tokens, and the keys and values of all its tokens, as in a row without sharing:
those of its prefix are copied from the earlier sequence. So attention needs no mask of its own and uses the kernels for
runs with more keys than queries. Whatever else a layer does, it does once for each computed token. The gradient of a
key is the sum over its copies.
Tests: tests/unit/backends/megatron/test_shared_prefixes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.kernels.fused import recompute_in_backward
from asyncrl.backends.micro_batches import LENGTH_RATIO, Rectangles, to_device
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.batching.prefixes import DistinctTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuns:
    """A run for each sequence of a padded row that has tokens of its own, and one for the padding.

    query_boundaries, key_boundaries  i32[runs + 1], of the row's computed tokens and of the keys
    copies  i64[K]: the row's token that each key is
    """

    query_boundaries: NDArray[np.int32]
    key_boundaries: NDArray[np.int32]
    copies: NDArray[np.int64]

    @property
    def are_shared(self) -> bool:
        return len(self.copies) > int(self.query_boundaries[-1])

    @classmethod
    def from_row(cls, micro_batch: MicroBatch, distinct: DistinctTokens, *, length: int) -> RowRuns:
        """length: of the padded row"""
        lengths, num_tokens = np.diff(micro_batch.boundaries), len(distinct.first)
        own = lengths - distinct.shared
        is_key = np.repeat(own > 0, lengths)  # a sequence that another one begins with has no run
        padding = [length - num_tokens] if length > num_tokens else []
        return cls(
            query_boundaries=_boundaries([*own[own > 0], *padding]),
            key_boundaries=_boundaries([*lengths[own > 0], *padding]),
            copies=np.concatenate([distinct.of[is_key], np.arange(num_tokens, length)]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    """What belongs to which computed token. A model's outputs of computed tokens become those of each sequence.

    token_of    i64[tokens of the row]: the computed token that each token is
    target_of   i64[M]: which of RowPart.num_targets each token is that needs a logprob; None: each is one of its own
    num_copies  f32[n]: tokens of the row that each token of a rank's part stands for; 0 for padding
    """

    token_of: torch.Tensor
    num_copies: torch.Tensor
    target_of: torch.Tensor | None = None

    @classmethod
    def from_arrays(cls, moved: Mapping[str, torch.Tensor]) -> SharedTokens:
        return cls(token_of=moved["token_of"], num_copies=moved["num_copies"], target_of=moved.get("target_of"))


def _boundaries(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@contextmanager
def copied(key: torch.Tensor, value: torch.Tensor, copies: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys and values [K, heads, d] of runs. Attention inside copies them again in its backward pass.

    Kept for it, the copies of eight samples of a long prompt would take as much memory as a layer's other activations.
    """
    originals = key.detach(), value.detach()
    keys, values = (_Copies.apply(x, copies) for x in (key, value))  # type: ignore[no-untyped-call]
    if not torch.is_grad_enabled():
        yield keys, values
        return
    with recompute_in_backward(
        (keys, lambda: originals[0].index_select(0, copies)), (values, lambda: originals[1].index_select(0, copies))
    ):
        yield keys, values


class _Copies(torch.autograd.Function):
    """x.index_select(0, copies), whose gradients are summed in float32: a prompt may have many copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(copies)
        ctx.length = len(x)
        return x.index_select(0, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        sums = torch.zeros(ctx.length, *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
        return sums.index_add_(0, copies, gradient.float()).to(gradient.dtype), None


def attend_in_rectangles(micro_batch: MicroBatch, distinct: DistinctTokens, *, device: torch.device) -> Rectangles:
    """Return the attention of a whole row without variable-length support."""
    indices, keys, order = rectangles(micro_batch, distinct)
    arrays = {f"queries {i}": one for i, one in enumerate(indices)} | {f"keys {i}": one for i, one in enumerate(keys)}
    moved = to_device(arrays | {"order": order}, device)
    return Rectangles(
        indices=tuple(moved[f"queries {i}"] for i in range(len(indices))),
        keys=tuple(moved[f"keys {i}"] for i in range(len(keys))),
        order=moved["order"],
    )


def rectangles(
    micro_batch: MicroBatch, distinct: DistinctTokens
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return ``indices``, ``keys`` and ``order`` of Rectangles, in numbers of computed tokens.

    Each rectangle has sequences that share about as many tokens and are about as long after them. It has queries for
    all that comes after the least that one of them shares. Example: of two sequences of 9 tokens that share 4 and 5
    with the one before them, both have queries for 5 tokens. The first query of the second one is a shared token, which
    nobody reads.
    """
    starts, lengths = micro_batch.boundaries[:-1].astype(np.int64), np.diff(micro_batch.boundaries).astype(np.int64)
    shared = distinct.shared
    groups: list[list[int]] = []
    for number in np.lexsort((-lengths, shared)).tolist():
        if lengths[number] == shared[number]:
            continue  # another sequence begins with it
        if not groups or not _fits(number, groups[-1], lengths, shared):
            groups.append([])
        groups[-1].append(number)
    indices, keys, order = list[NDArray[np.int64]](), list[NDArray[np.int64]](), np.zeros(len(distinct.first), np.int64)
    offset = 0
    for group in groups:
        least, own, start = shared[group[0]], lengths[group][:, None], starts[group][:, None]
        places = np.arange(lengths[group].max())
        seen = distinct.of[start + np.minimum(places, own - 1)]
        queries, places = seen[:, least:], places[least:]
        is_own = (places >= shared[group][:, None]) & (places < own)
        order[queries[is_own]] = offset + np.flatnonzero(is_own)
        offset += queries.size
        indices.append(queries)
        keys.append(seen)
    return indices, keys, order


def _fits(number: int, group: list[int], lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> bool:
    """Return whether most of the queries of a sequence would be its own tokens, and about as many as the others'."""
    rest = lengths[[*group, number]] - shared[group[0]]
    return bool(lengths[number] - shared[number] >= LENGTH_RATIO * rest[-1] and rest.min() >= LENGTH_RATIO * rest.max())
