"""Places a rank's part of a parameter within the whole parameter, and gives the parameter its checkpoint key.

The whole parameter is what a single rank would hold, without padding. A tensor-parallel rank of a "gate_up" holds rows
of the gate and rows of the up part. These are not adjacent in the whole parameter, hence blocks.
Tests: tests/unit/backends/test_weight_places.py. Ranks are only numbers here, so tests need no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncrl.backends.families.layer_weights import Cut
from asyncrl.backends.families.shape import ModelShape

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The elements of ``sizes`` at ``local`` in a rank's tensor are those at ``start`` in the whole tensor."""

    local: Ints
    start: Ints
    sizes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's tensor with sizes ``local`` within the tensor ``key`` of a checkpoint, which has sizes ``whole``."""

    key: str
    local: Ints
    whole: Ints
    blocks: tuple[Block, ...]

    def views(self, flat: torch.Tensor, start: int = 0) -> Iterator[tuple[torch.Tensor, Ints]]:
        """Yield views of ``flat`` that are rectangles of the whole tensor, and where each begins there.

        ``flat`` holds the tensor's elements from ``start`` on, row by row. Views leave out padding.
        """
        # The distributed optimizer cuts a flattened tensor anywhere: elements 5 to 11 of [4, 3] are one of row 1 and
        # all of rows 2 and 3, so two rectangles. Each is cut further where the blocks of a fused tensor meet.
        for corner, sizes in rectangles(start, start + flat.numel(), self.local):
            begin = _flat_index(corner, self.local) - start
            rectangle = flat[begin : begin + math.prod(sizes)].view(sizes)
            for block in self.blocks:
                # the overlap of rectangle and block, in the rank's tensor
                first = [max(a, b) for a, b in zip(corner, block.local, strict=True)]
                after = [min(a + n, b + m) for a, n, b, m in zip(corner, sizes, block.local, block.sizes, strict=True)]
                if all(a < b for a, b in zip(first, after, strict=True)):
                    own = tuple(slice(a - c, b - c) for a, b, c in zip(first, after, corner, strict=True))
                    moved = zip(first, block.local, block.start, strict=True)
                    yield rectangle[own], tuple(a - b + s for a, b, s in moved)


def place(
    name: str,
    cut: Cut,
    local: Sequence[int],
    shape: ModelShape,
    *,
    ranks: int,
    rank: int,
    first_expert: int = 0,
) -> Place:
    """Return the place of parameter ``name`` on tensor-parallel rank ``rank`` of ``ranks`` (experts:
    expert-tensor-parallel).

    name          numbers the layer by its place in the whole model
    local         sizes of the rank's tensor
    first_expert  for experts: the first one that the rank holds
    """
    size, *rest = local
    zeros = (0,) * len(local)
    start, whole = zeros, tuple(local)
    blocks: tuple[Block, ...] = ()
    if cut.startswith("expert_"):
        assert shape.experts is not None
        start, whole = (first_expert, *zeros[1:]), (shape.experts.num_experts, *rest)
        if ranks > 1:
            start, whole, blocks = _of_experts(cut, start, whole, local, ranks=ranks, rank=rank)
    elif cut == "rows":
        start, whole = (0, rank * rest[0]), (size, ranks * rest[0])
    elif cut == "stacked_rows":
        start, whole = (0, 0, rank * rest[1]), (size, rest[0], ranks * rest[1])
    elif cut == "vocabulary":  # some of the last rows are padding
        held = max(0, min(size, shape.vocabulary_size - rank * size))
        whole = (shape.vocabulary_size, *rest)
        blocks = (Block(local=zeros, start=(rank * size, *zeros[1:]), sizes=(held, *rest)),)
    elif cut in ("gate_up", "gate_then_up"):
        # Rank 0 of 2 holds [gate 0, up 0], and the whole tensor is [gate 0, gate 1, up 0, up 1].
        half = size // 2
        whole = (ranks * size, *rest)
        blocks = tuple(
            Block(
                local=(part * half, *zeros[1:]), start=((part * ranks + rank) * half, *zeros[1:]), sizes=(half, *rest)
            )
            for part in (0, 1)
        )
    elif cut in ("heads", "qkv", "gated_qkv", "delta_heads", "delta_parts", "delta_kernels"):
        start, whole = (rank * size, *zeros[1:]), (ranks * size, *rest)
    blocks = blocks or (Block(local=zeros, start=start, sizes=tuple(local)),)
    return Place(key=key(name), local=tuple(local), whole=whole, blocks=blocks)


def _of_experts(
    cut: Cut, start: Ints, whole: Ints, local: Sequence[int], *, ranks: int, rank: int
) -> tuple[Ints, Ints, tuple[Block, ...]]:
    """Return start, whole sizes and blocks of experts that ``ranks`` share: as "rows" and "gate_up", for each."""
    number, size, *rest = local
    if cut == "expert_rows":
        return (start[0], 0, rank * rest[0]), (whole[0], size, ranks * rest[0]), ()
    assert cut == "expert_gate_up", f"experts with the cut {cut} are not shared"
    half = size // 2
    return (
        start,
        (whole[0], ranks * size, *rest),
        tuple(
            Block(
                local=(0, part * half, 0),
                start=(start[0], (part * ranks + rank) * half, 0),
                sizes=(number, half, *rest),
            )
            for part in (0, 1)
        ),
    )


def rectangles(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
    """Cover the elements [start, stop) of a tensor, counted row by row, by few rectangles; yields corner and sizes."""
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield (start,)[: len(sizes)], (stop - start,)[: len(sizes)]
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # a part of one row
        yield from _in_row(last, start - last * row, stop - last * row, sizes)
        return
    yield from _in_row(first - 1, start - (first - 1) * row, row, sizes) if start < first * row else ()
    if first < last:
        yield (first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])
    yield from _in_row(last, 0, stop - last * row, sizes)


def _in_row(row: int, start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
    for corner, part in rectangles(start, stop, sizes[1:]):
        yield (row, *corner), (1, *part)


def _flat_index(corner: Sequence[int], sizes: Sequence[int]) -> int:
    index = 0
    for at, size in zip(corner, sizes, strict=True):
        index = index * size + at
    return index


# -- keys --------------------------------------------------------------------------------------------------------------

_KEYS: Final = {
    "self_attention.query_down.weight": "self_attention.linear_q_down_proj.weight",
    "self_attention.query_norm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.query_up.weight": "self_attention.linear_q_up_proj.weight",
    "self_attention.key_value_down.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attention.key_value_norm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.key_value_up.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.post_norm": "post_self_attn_layernorm.weight",
    "mlp.linear_fc2.post_norm": "post_mlp_layernorm.weight",
    "self_attention.sinks": "self_attention.core_attention.softmax_offset",
    "mlp.experts.gate_up_bias": "mlp.experts.experts.linear_fc1.bias",
    "mlp.experts.down_bias": "mlp.experts.experts.linear_fc2.bias",
    "mlp.experts.gate_up": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.down": "mlp.experts.experts.linear_fc2.weight",
}
"""Our names of parameters in a layer, and the names in Megatron's layers with Transformer Engine, where they differ."""

_ELSEWHERE: Final = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("pre_mlp_layernorm.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attention.q_layernorm.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attention.kv_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attention.linear_q_proj.weight",),
}
"""Alternative keys of the same parameters in Megatron checkpoints: from layers without Transformer Engine, or whose
queries have no low rank."""


def key(name: str) -> str:
    """Return the key of a parameter in a checkpoint."""
    layer, rest = _split(name)
    return layer + _KEYS.get(rest, rest)


def keys_elsewhere(key: str) -> tuple[str, ...]:
    """Return alternative keys that a Megatron checkpoint may use for ``key``."""
    layer, rest = _split(key)
    return tuple(layer + other for other in _ELSEWHERE.get(rest, ()))


def _split(name: str) -> tuple[str, str]:
    """Split into "decoder.layers.3." and the rest; ("", name) outside layers."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return "", name
    return ".".join(parts[:3]) + ".", ".".join(parts[3:])
