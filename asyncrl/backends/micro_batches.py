"""What every backend reads out of a micro-batch, and its way to the device in one copy nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.algorithms import LossInputs
from asyncrl.policies.objective import ValueInputs
from asyncrl.policies.packing import MicroBatch

LENGTH_RATIO = 0.75
"""A document shares a rectangle with another when it is at least this fraction of its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """A packed row of N tokens laid out as few rectangles, each a set of documents of similar length.

    Attention needs documents apart; one call per document is slow when there are many, one rectangle for all is large
    when lengths differ. A document fills a row of its rectangle from the left and its last token fills what remains:
    a causal model never lets a token see what stands right of it, so the filling changes nothing that is read back.

    indices  i64[documents, length] each: which token of the packed row stands there
    order    i64[N]: where each token of the packed row stands in the rectangles flattened end to end
    """

    indices: tuple[torch.Tensor, ...]
    order: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A micro-batch on the device.

    tokens, positions  i64[N];  boundaries  i32[D+1];  longest  tokens of the longest document
    rows               i64[M]: tokens that need a logprob
    layout             the documents as rectangles, for attention that has no use for boundaries
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    boundaries: torch.Tensor
    longest: int
    rows: torch.Tensor
    layout: Rectangles | None
    _loss: Mapping[str, torch.Tensor]
    _scores: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, micro_batch: MicroBatch, rows: NDArray[np.int64], *, device: torch.device, in_rectangles: bool
    ) -> PackedRow:
        arrays: dict[str, NDArray[Any]] = {
            "tokens": micro_batch.tokens.astype(np.int64),
            "positions": micro_batch.positions.astype(np.int64),
            "boundaries": micro_batch.boundaries,
            "rows": rows,
        }
        loss = {name: getattr(micro_batch, name)[rows] for name in _LOSS}
        scores = {f"score {name}": array[rows] for name, array in micro_batch.scores.items()}
        loss["sequence"] = np.searchsorted(micro_batch.boundaries[1:], rows, side="right")
        parts, order = rectangles(micro_batch.boundaries) if in_rectangles else ([], np.empty(0, np.int64))
        rectangular = {f"rectangle {i}": part for i, part in enumerate(parts)} | {"order": order}
        moved = to_device(arrays | loss | scores | rectangular, device)
        layout = Rectangles(indices=tuple(moved[f"rectangle {i}"] for i in range(len(parts))), order=moved["order"])
        return cls(
            **{name: moved[name] for name in arrays},
            longest=int(np.diff(micro_batch.boundaries).max()),
            layout=layout if in_rectangles else None,
            _loss={name: moved[name] for name in loss},
            _scores={name: moved[f"score {name}"] for name in micro_batch.scores},
        )

    def loss_inputs(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossInputs:
        """The numbers of ``rows`` beside their logprobs and entropy f32[M]."""
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            num_sequences=len(self.boundaries) - 1,
            scores=self._scores,
            **self._loss,
        )

    def value_inputs(self, values: torch.Tensor) -> ValueInputs:
        """Values after each token f32[N] -> those before each of ``rows``, and the numbers of ``rows`` beside them.

        The micro-batch has the scores "old_values" and "returns".
        """
        return ValueInputs(
            values=values.index_select(0, self.rows - 1),
            old_values=self._scores["old_values"],
            returns=self._scores["returns"],
            loss_weights=self._loss["loss_weights"],
            sequence=self._loss["sequence"],
            num_sequences=len(self.boundaries) - 1,
        )


_LOSS = ("behavior_logprobs", "advantages", "loss_weights", "is_fresh", "staleness")
_ALIGNMENT = 16


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of the arrays, in one transfer that the host does not wait for."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name], end = end, end + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        buffer.numpy()[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    moved = buffer.to(device, non_blocking=True)
    return {
        name: moved[starts[name] : starts[name] + array.nbytes].view(_TORCH[array.dtype.str]).view(array.shape)
        for name, array in arrays.items()
    }


_TORCH = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32, "|b1": torch.bool}


def rectangles(boundaries: NDArray[np.int32]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """The arrays of Rectangles: documents by falling length, a new one when they get shorter than LENGTH_RATIO of its
    first.  i32[D+1]
    """
    lengths = np.diff(boundaries).astype(np.int64)
    groups: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable"):
        if not groups or lengths[document] < LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(int(document))
    indices: list[NDArray[np.int64]] = []
    order = np.zeros(int(boundaries[-1]), np.int64)
    offset = 0
    for group in groups:
        columns = np.arange(lengths[group[0]])
        rows = boundaries[group].astype(np.int64)[:, None] + np.minimum(columns, lengths[group][:, None] - 1)
        is_token = columns < lengths[group][:, None]
        order[rows[is_token]] = offset + np.flatnonzero(is_token)
        offset += rows.size
        indices.append(rows)
    return indices, order


def response_rows(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """i64[M]: tokens the policy sampled. The first token of a document has no logprob and is never one."""
    mask = np.array(micro_batch.response_mask)
    mask[micro_batch.boundaries[:-1]] = False
    return np.flatnonzero(mask)


def predicted_rows(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """i64[N - D]: every token that has one before it in its document."""
    return np.flatnonzero(micro_batch.positions)
