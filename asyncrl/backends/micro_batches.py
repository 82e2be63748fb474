"""Micro-batches as backends use them, copied to the device in one asynchronous transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.batching.images import NO_IMAGES, PackedImages
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.losses.loss import LikeliestTokens, LossInputs

LENGTH_RATIO = 0.75
"""Sequences share a rectangle if each has at least this fraction of the longest one's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """A packed row of N tokens as a few rectangles, each with sequences of similar length.

    Attention must not cross sequences. One call per sequence is slow when there are many, and a single rectangle wastes
    memory when lengths differ. Sequences are left-aligned and padded by repeating their last token. With causal
    attention, this padding cannot change the outputs that are read back.

    indices  i64[sequences, length] each: the token of the packed row at each position
    order    i64[N]: position of each token of the packed row in the flattened, concatenated rectangles
    keys     i64[sequences, length of keys] each: what the tokens of ``indices`` see, up to and including themselves;
             empty: ``indices``
    """

    indices: tuple[torch.Tensor, ...]
    order: torch.Tensor
    keys: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What tokens were sampled from, where it is not softmax(logits / rollout.temperature) over the whole vocabulary.

    support       i64[K] each: the number of a token, and a token of its support (messages/support.py); tokens without
                  any have the whole vocabulary. None if all have
    temperatures  f32[M]; 0 where it is rollout.temperature. None if that is everywhere
    """

    support: tuple[torch.Tensor, torch.Tensor] | None = None
    temperatures: torch.Tensor | None = None

    @classmethod
    def from_arrays(cls, moved: Mapping[str, torch.Tensor]) -> Distribution:
        """From ``distribution_arrays``, on the device."""
        support = (moved["support rows"], moved["support tokens"]) if "support rows" in moved else None
        return cls(support=support, temperatures=moved.get("temperatures"))

    def temperature(self, default: float) -> float | torch.Tensor:
        """Return ``default``, or f32[M, 1] if any token was sampled at another temperature."""
        if self.temperatures is None:
            return default
        return torch.where(self.temperatures > 0, self.temperatures, default)[:, None]


def has_distributions(micro_batch: MicroBatch) -> bool:
    """Return whether any token was sampled from something else than softmax(logits / rollout.temperature)."""
    return len(micro_batch.temperatures) > 0 or bool(micro_batch.support.counts.any())


def distribution_arrays(micro_batch: MicroBatch, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the arrays of the ``Distribution`` of the tokens at ``rows``; only those that it has."""
    found: dict[str, NDArray[Any]] = {}
    numbers, tokens = micro_batch.support.of_rows(rows)
    if len(tokens):
        found |= {"support rows": numbers, "support tokens": tokens}
    if len(micro_batch.temperatures):
        found["temperatures"] = micro_batch.temperatures[rows]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A micro-batch on the device.

    tokens, positions  i64[N];  boundaries  i32[D+1];  longest  tokens of the longest sequence
    is_decoded         bool[N], as in MicroBatch
    rows               i64[M]: tokens that need a logprob
    distribution       how the tokens of ``rows`` were sampled
    layout             the sequences as rectangles, for attention without variable-length support
    images             the images that it shows, on the host
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    boundaries: torch.Tensor
    longest: int
    is_decoded: torch.Tensor
    rows: torch.Tensor
    layout: Rectangles | None
    distribution: Distribution
    _loss: Mapping[str, torch.Tensor]
    _model_outputs: Mapping[str, torch.Tensor]
    _likeliest: Mapping[str, LikeliestTokens]
    images: PackedImages = NO_IMAGES

    @classmethod
    def from_micro_batch(
        cls, micro_batch: MicroBatch, rows: NDArray[np.int64], *, device: torch.device, in_rectangles: bool
    ) -> PackedRow:
        arrays: dict[str, NDArray[Any]] = {
            "tokens": micro_batch.tokens.astype(np.int64),
            "positions": micro_batch.positions.astype(np.int64),
            "boundaries": micro_batch.boundaries,
            "is_decoded": micro_batch.is_decoded,
            "rows": rows,
        }
        sampled = distribution_arrays(micro_batch, rows)
        loss = {name: getattr(micro_batch, name)[rows] for name in _LOSS}
        likely: dict[str, NDArray[Any]] = {}
        for name, of in micro_batch.likeliest.items():
            likely |= {f"{name} tokens": of.tokens[rows].astype(np.int64), f"{name} logprobs": of.logprobs[rows]}
        outputs = {f"output {name}": array[rows] for name, array in micro_batch.model_outputs.items()}
        loss["sequence"] = np.searchsorted(micro_batch.boundaries[1:], rows, side="right")
        parts, order = rectangles(micro_batch.boundaries) if in_rectangles else ([], np.empty(0, np.int64))
        rectangular = {f"rectangle {i}": part for i, part in enumerate(parts)} | {"order": order}
        moved = to_device(arrays | loss | outputs | likely | rectangular | sampled, device)
        layout = Rectangles(indices=tuple(moved[f"rectangle {i}"] for i in range(len(parts))), order=moved["order"])
        return cls(
            **{name: moved[name] for name in arrays},
            longest=int(np.diff(micro_batch.boundaries).max()),
            layout=layout if in_rectangles else None,
            distribution=Distribution.from_arrays(moved),
            _loss={name: moved[name] for name in loss},
            _model_outputs={name: moved[f"output {name}"] for name in micro_batch.model_outputs},
            images=micro_batch.images,
            _likeliest={
                name: LikeliestTokens(tokens=moved[f"{name} tokens"], logprobs=moved[f"{name} logprobs"])
                for name in micro_batch.likeliest
            },
        )

    def loss_inputs(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, logits: torch.Tensor | None = None
    ) -> LossInputs:
        """Return the loss inputs of ``rows``, given their logprobs and entropy f32[M], and perhaps logits f32[M, V]."""
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            tokens=self.tokens[self.rows],
            logits=logits,
            num_sequences=len(self.boundaries) - 1,
            model_outputs=self._model_outputs,
            behavior_likeliest=self._likeliest.get("behavior_likeliest"),
            teacher_likeliest=self._likeliest.get("teacher_likeliest"),
            **self._loss,
        )

    def value_inputs(self, values: torch.Tensor) -> ValueInputs:
        """Return the value loss inputs of ``rows``, given the value after each token f32[N].

        The value *before* each row is used. The micro-batch must have the outputs "old_values" and "returns".
        """
        return ValueInputs(
            values=values.index_select(0, self.rows - 1),
            old_values=self._model_outputs["old_values"],
            returns=self._model_outputs["returns"],
            loss_weights=self._loss["loss_weights"],
            sequence=self._loss["sequence"],
            num_sequences=len(self.boundaries) - 1,
        )


_LOSS = ("behavior_logprobs", "advantages", "loss_weights", "is_fresh", "staleness")
_ALIGNMENT = 16


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the arrays to the device, in one transfer that does not block the host."""
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


_TORCH = {"<i8": torch.int64, "<i4": torch.int32, "<i2": torch.int16, "<f4": torch.float32, "|b1": torch.bool}


def rectangles(boundaries: NDArray[np.int32]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return ``indices`` and ``order`` of Rectangles.  boundaries: i32[D+1]

    Sequences are sorted by length, longest first. A sequence shorter than LENGTH_RATIO times the first one of its
    rectangle starts a new rectangle.
    """
    lengths = np.diff(boundaries).astype(np.int64)
    groups: list[list[int]] = []
    for sequence in np.argsort(-lengths, kind="stable"):
        if not groups or lengths[sequence] < LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(int(sequence))
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
    """Return i64[M]: the tokens that the policy sampled, without the first of each sequence, which has no logprob."""
    mask = np.array(micro_batch.response_mask)
    mask[micro_batch.boundaries[:-1]] = False
    return np.flatnonzero(mask)


def predicted_rows(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """Return i64[N - D]: every token except the first of each sequence."""
    return np.flatnonzero(micro_batch.positions)


class RecordedTokens:
    """Logprobs and entropy of recorded sequences in a step. They stay on the device until the end, then are copied."""

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._rows: list[torch.Tensor] = []

    def add(self, micro_batch: MicroBatch, outputs: Sequence[torch.Tensor]) -> None:
        """Keep the outputs of recorded sequences. Outputs of a value head are ignored.

        outputs  logprobs and entropy f32[M] of the response rows, first
        """
        if not micro_batch.recorded or len(outputs) < 2:
            return
        ends = np.searchsorted(response_rows(micro_batch), micro_batch.boundaries)
        both = torch.stack([output.detach() for output in outputs[:2]])
        for place, sequence in enumerate(micro_batch.sequences.tolist()):
            if sequence in micro_batch.recorded:
                self._sequences.append(sequence)
                self._rows.append(both[:, ends[place] : ends[place + 1]])

    def on_host(self) -> dict[int, NDArray[np.float32]]:
        """Return f32[2, M] by sequence. Waits for the device."""
        if not self._rows:
            return {}
        joined = torch.cat(self._rows, dim=1).float().cpu().numpy()
        ends = np.cumsum([rows.shape[1] for rows in self._rows])
        return dict(zip(self._sequences, np.split(joined, ends[:-1], axis=1), strict=True))
