"""The part of a packed row that one rank computes, and where its results belong in the row.

Context parallelism cuts the whole row, not its sequences, into two pieces per rank. Rank r of R has pieces r and
2R - 1 - r, so that all ranks compute the same amount of attention. A rank has the queries of its pieces and gathers the
keys and values of the row. Positions travel with the tokens. Only the end of the row is padded, by one sequence.
With shared prefixes, the row that is cut is that of the computed tokens.
Tests: tests/unit/backends/megatron/test_row_part.py, test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.megatron import shared_prefixes
from asyncrl.backends.megatron.packed_attention import Piece, Pieces, uses_varlen
from asyncrl.backends.megatron.row_images import RowImages
from asyncrl.backends.megatron.shared_prefixes import RowRuns, SharedTokens
from asyncrl.backends.micro_batches import (
    Distribution,
    PackedRow,
    Rectangles,
    distribution_arrays,
    has_distributions,
    to_device,
)
from asyncrl.config.adapter import Layout
from asyncrl.messages.routing import ExpertArray, unrouted
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.batching.prefixes import DistinctTokens


@dataclass(slots=True)
class Routing:
    """The experts to which this rank's routers sent the tokens of a row, recorded in one pass and replayed in others.

    by_layer     i16[n, k] by the number of the layer, of the tokens that the rank's router sees
    is_complete  whether it is replayed
    """

    by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """A packed row, padded to a length N that ranks can share, and the n tokens of it that this rank holds.

    Tokens that sequences share are once in the padded row (shared_prefixes.py), and in each of them in ``row``.

    tokens, positions  i64[n]
    attention          the keys that each token sees
    sources            i64[m]: indices in the part of the hidden states that predict tokens of ``row.rows``
    targets            i64[m]: the predicted tokens
    distribution       how they were sampled
    places             i64[m]: their indices among ``num_targets`` of all ranks; None if this rank has all of them
    kept               i64[n]: positions of the part's tokens in the padded row; None: all of them
    experts            i16[layers, n, k] that the engine chose, -1 where the router chooses; None if it always does
    expert_layers      numbers of these layers; None: all of the model
    routing            where to record the routers' choice, or what to replay; None: neither
    length             N
    num_unpadded       tokens of this rank that are not padding; they come first
    share_of_batch     the row's tokens, prompts included, / the batch's; 0 for fillers, and if the row is only scored
    row                the unpadded row: the objective's inputs
    micro_batch        the same data on the host
    num_targets        M, or less if sequences share tokens of ``row.rows``
    shared             what the row's sequences share; None if they share nothing
    images             what the rank's tokens show; None if the row shows no image
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: Rectangles | Pieces
    sources: torch.Tensor
    targets: torch.Tensor
    distribution: Distribution
    places: torch.Tensor | None
    kept: torch.Tensor | None
    experts: torch.Tensor | None
    length: int
    num_unpadded: int
    share_of_batch: float
    row: PackedRow
    micro_batch: MicroBatch
    num_targets: int
    expert_layers: tuple[int, ...] | None = None
    shared: SharedTokens | None = None
    routing: Routing | None = None
    images: RowImages | None = None

    @classmethod
    def from_micro_batch(
        cls,
        micro_batch: MicroBatch,
        rows: NDArray[np.int64],
        *,
        layout: Layout,
        context_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        tensor_rank: int = 0,
        is_routed: bool = False,
        expert_layers: tuple[int, ...] | None = None,
        batch_tokens: int = 0,
    ) -> RowPart:
        """
        rows          i64[M]: tokens that need a logprob
        tensor_rank   which tensor-parallel rank this is
        is_routed     whether to use the engine's experts, if the micro-batch has them
        expert_layers  see above
        batch_tokens  tokens of the batch that is trained; 0 if none is
        """
        share = micro_batch.num_tokens / batch_tokens if batch_tokens and not micro_batch.is_filler else 0.0
        is_shared = len(micro_batch.shared) > 0
        # Example: 10 tokens, two context-parallel ranks. The row is padded to 12 and cut into four pieces of 3; rank 0
        # keeps tokens 0-2 and 9-11, rank 1 keeps 3-8. Token n is predicted by the rank that has n - 1.
        distinct = DistinctTokens.from_row(micro_batch.boundaries, micro_batch.shared)
        num_tokens = len(distinct.first)
        length = -(-num_tokens // layout.row_multiple) * layout.row_multiple
        kept = tokens_of_rank(context_rank, length=length, ranks=layout.context)
        targets, target_of = _distinct_targets(rows, distinct, micro_batch) if is_shared else (rows, None)
        arrays = _cut_arrays(micro_batch, distinct, targets, kept=kept, padding=length - num_tokens)
        if is_routed and len(micro_batch.experts):
            chosen = _by_layers(micro_batch.experts)[:, distinct.first]
            filled = np.pad(chosen, ((0, 0), (0, length - num_tokens), (0, 0)), constant_values=-1)
            arrays["experts"] = filled[:, kept]
        if is_shared:
            arrays |= {} if target_of is None else {"target_of": target_of}
            arrays["token_of"] = distinct.of
            arrays["num_copies"] = np.pad(distinct.num_copies, (0, length - num_tokens))[kept].astype(np.float32)
        moved = to_device(arrays, device)
        if layout.row_multiple == 1 and not uses_varlen(device, dtype):
            attention: Rectangles | Pieces = shared_prefixes.attend_in_rectangles(micro_batch, distinct, device=device)
        else:
            runs = RowRuns.from_row(micro_batch, distinct, length=length)
            attention = _pieces(runs, layout, context_rank, device)
        is_cut = layout.context > 1
        piece = (tensor_rank, layout.tensor) if layout.is_sequence_parallel else (0, 1)
        return cls(
            tokens=moved["tokens"],
            positions=moved["positions"],
            attention=attention,
            sources=moved["sources"],
            targets=moved["targets"],
            distribution=Distribution.from_arrays(moved),
            places=moved["places"] if is_cut else None,
            kept=moved["kept"] if is_cut else None,
            experts=moved.get("experts"),
            expert_layers=expert_layers,
            length=length,
            num_unpadded=int(np.searchsorted(kept, num_tokens)),
            share_of_batch=share,
            row=PackedRow.from_micro_batch(micro_batch, rows, device=device, in_rectangles=False),
            micro_batch=micro_batch,
            num_targets=len(targets),
            shared=SharedTokens.from_arrays(moved) if is_shared else None,
            images=RowImages.of_part(
                micro_batch.images, first=distinct.first, length=length, kept=kept, piece=piece, device=device
            ),
        )

    def experts_of(self, layer: int) -> torch.Tensor | None:
        """Return the engine's choice i64[n, k] in a layer of the model, numbered from 0; see ``experts``."""
        if self.experts is None:
            return None
        place = layer if self.expert_layers is None else self.expert_layers.index(layer)
        return self.experts[place].long()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self.micro_batch.boundaries).max(initial=0))

    @property
    def boundaries(self) -> NDArray[np.int32]:
        """i32[sequences + 1] of the padded row, if nothing is shared; the padding is a sequence."""
        assert self.shared is None
        return np.unique(np.append(self.micro_batch.boundaries, self.length)).astype(np.int32)


def _distinct_targets(
    rows: NDArray[np.int64], distinct: DistinctTokens, micro_batch: MicroBatch
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return ``rows``, each shared token once, and which of these each row is; None if every row has its own."""
    if has_distributions(micro_batch):  # a token's logprob differs between sequences
        return rows, None
    is_target = np.zeros(len(distinct.first), np.bool_)
    is_target[distinct.of[rows]] = True
    return distinct.first[is_target], (np.cumsum(is_target) - 1)[distinct.of[rows]]


def _cut_arrays(
    micro_batch: MicroBatch,
    distinct: DistinctTokens,
    targets: NDArray[np.int64],
    *,
    kept: NDArray[np.int64],
    padding: int,
) -> dict[str, NDArray[Any]]:
    """Return RowPart's arrays of the tokens ``kept``.  targets: all tokens of the row that need a logprob"""
    tokens = np.pad(micro_batch.tokens[distinct.first].astype(np.int64), (0, padding))
    positions = np.append(micro_batch.positions[distinct.first], np.arange(padding)).astype(np.int64)
    at = np.full(len(tokens), -1)  # where a token of the row is in this part
    at[kept] = np.arange(len(kept))
    before = at[distinct.of[targets - 1]]
    places = np.flatnonzero(before >= 0)
    return {
        "tokens": tokens[kept],
        "positions": positions[kept],
        "sources": before[places],
        "targets": micro_batch.tokens[targets[places]].astype(np.int64),
        "places": places,
        "kept": kept,
        **distribution_arrays(micro_batch, targets[places]),
    }


def _by_layers(experts: ExpertArray) -> NDArray[np.int16]:
    """[n, layers, k] -> [layers, n, k], with -1 for unrouted tokens"""
    by_layers = experts.astype(np.int16).transpose(1, 0, 2)
    return np.where(experts.transpose(1, 0, 2) == unrouted(experts), np.int16(-1), by_layers)


def spans(rank: int, *, length: int, ranks: int) -> list[tuple[int, int]]:
    """Return begin and end of the pieces of a row that a context-parallel rank holds."""
    if ranks == 1:
        return [(0, length)]
    size = length // (2 * ranks)
    return [(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank)]


def tokens_of_rank(rank: int, *, length: int, ranks: int) -> NDArray[np.int64]:
    """Return i64[length / ranks]: the tokens that a rank holds, in rising order."""
    return np.concatenate([np.arange(*span) for span in spans(rank, length=length, ranks=ranks)])


def order(*, length: int, ranks: int) -> NDArray[np.int64]:
    """Return i64[length]: the position of each token of the row in the concatenated parts of all ranks."""
    return np.argsort(np.concatenate([tokens_of_rank(rank, length=length, ranks=ranks) for rank in range(ranks)]))


def _pieces(runs: RowRuns, layout: Layout, context_rank: int, device: torch.device) -> Pieces:
    """Return the attention of a rank's pieces of a row."""
    length, arrays = int(runs.query_boundaries[-1]), dict[str, NDArray[Any]]()
    cuts = [_Cut.between(runs, *span) for span in spans(context_rank, length=length, ranks=layout.context)]
    for i, cut in enumerate(cuts):
        arrays |= {f"queries {i}": cut.query_boundaries, f"keys {i}": cut.key_boundaries}
    if layout.context > 1:
        arrays["order"] = order(length=length, ranks=layout.context)
    if runs.are_shared:
        arrays["copies"] = runs.copies
    moved = to_device(arrays, device)
    size = length // layout.context // len(cuts)
    pieces = [cut.piece(moved[f"queries {i}"], moved[f"keys {i}"], size * i) for i, cut in enumerate(cuts)]
    return Pieces(pieces=pieces, order=moved.get("order"), copies=moved.get("copies"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A piece [begin, end) of a row: a run for each sequence in it, with the keys from the sequence's start on."""

    begin: int
    end: int
    first_key: int
    end_key: int
    query_boundaries: NDArray[np.int32]
    key_boundaries: NDArray[np.int32]

    @classmethod
    def between(cls, runs: RowRuns, begin: int, end: int) -> _Cut:
        boundaries = runs.query_boundaries
        first, last = np.searchsorted(boundaries, begin, "right") - 1, np.searchsorted(boundaries, end, "left")
        starts, keys = boundaries[first:last], runs.key_boundaries[first:last]
        end_key = runs.key_boundaries[last] - (boundaries[last] - end)  # the last run may go on in the next piece
        return cls(
            begin=begin,
            end=end,
            first_key=int(keys[0]),
            end_key=int(end_key),
            query_boundaries=(np.append(np.maximum(starts, begin), end) - begin).astype(np.int32),
            key_boundaries=(np.append(keys, end_key) - keys[0]).astype(np.int32),
        )

    def piece(self, query_boundaries: torch.Tensor, key_boundaries: torch.Tensor, offset: int) -> Piece:
        """offset: where the piece's queries begin in the rank's part"""
        return Piece(
            queries=slice(offset, offset + self.end - self.begin),
            keys=slice(self.first_key, self.end_key),
            query_boundaries=query_boundaries,
            key_boundaries=key_boundaries,
            longest_query=int(np.diff(self.query_boundaries).max()),
            longest_key=int(np.diff(self.key_boundaries).max()),
            runs=list(zip(_slices(self.query_boundaries), _slices(self.key_boundaries), strict=True)),
        )


def _slices(boundaries: NDArray[np.int32]) -> Sequence[slice]:
    return [slice(int(begin), int(end)) for begin, end in zip(boundaries[:-1], boundaries[1:], strict=True)]
