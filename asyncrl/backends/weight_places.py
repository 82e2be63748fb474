"""Where a rank's part of a parameter lies in the whole one, under which key: what a checkpoint knows a model by.

The whole parameter is what one rank alone would hold, without padding. A tensor-parallel rank of a "gate_up" has rows
of the gate and rows of the up part, which lie apart in it, hence blocks.
Tests: tests/unit/backends/test_weight_places.py. Ranks are just numbers here, so tests need no process group.
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
    """``sizes`` of a rank's tensor at ``local`` are the whole one's at ``start``."""

    local: Ints
    start: Ints
    sizes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's tensor, of the sizes ``local``, in the one of the sizes ``whole`` that a checkpoint has as ``key``."""

    key: str
    local: Ints
    whole: Ints
    blocks: tuple[Block, ...]

    def views(self, flat: torch.Tensor, start: int = 0) -> Iterator[tuple[torch.Tensor, Ints]]:
        """``flat`` are the tensor's elements from ``start`` on, row by row: views of it that are rectangles of the
        whole tensor, and where each begins there. What is padding is in none."""
        for corner, sizes in rectangles(start, start + flat.numel(), self.local):
            begin = _flat_index(corner, self.local) - start
            rectangle = flat[begin : begin + math.prod(sizes)].view(sizes)
            for block in self.blocks:
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
    """Of the parameter ``name`` (its layer's number that of the whole model), of which tensor-parallel rank ``rank`` of
    ``ranks`` has a tensor of the sizes ``local``; of experts every rank has those from ``first_expert`` on, uncut."""
    size, *rest = local
    zeros = (0,) * len(local)
    start, whole = zeros, tuple(local)
    blocks: tuple[Block, ...] = ()
    if cut.startswith("expert_"):
        assert shape.experts is not None
        start, whole = (first_expert, *zeros[1:]), (shape.experts.num_experts, *rest)
    elif cut == "rows":
        start, whole = (0, rank * rest[0]), (size, ranks * rest[0])
    elif cut == "stacked_rows":
        start, whole = (0, 0, rank * rest[1]), (size, rest[0], ranks * rest[1])
    elif cut == "vocabulary":  # some of the last rows are padding
        held = max(0, min(size, shape.vocabulary_size - rank * size))
        whole = (shape.vocabulary_size, *rest)
        blocks = (Block(local=zeros, start=(rank * size, *zeros[1:]), sizes=(held, *rest)),)
    elif cut in ("gate_up", "gate_then_up"):
        half = size // 2
        whole = (ranks * size, *rest)
        blocks = tuple(
            Block(
                local=(part * half, *zeros[1:]), start=((part * ranks + rank) * half, *zeros[1:]), sizes=(half, *rest)
            )
            for part in (0, 1)
        )
    elif cut in ("heads", "qkv"):
        start, whole = (rank * size, *zeros[1:]), (ranks * size, *rest)
    blocks = blocks or (Block(local=zeros, start=start, sizes=tuple(local)),)
    return Place(key=key(name), local=tuple(local), whole=whole, blocks=blocks)


def rectangles(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
    """The elements [start, stop) of a tensor, counted row by row, as few rectangles: corner and sizes of each."""
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
    "self_attention.linear_proj.norm_behind": "post_self_attn_layernorm.weight",
    "mlp.linear_fc2.norm_behind": "post_mlp_layernorm.weight",
    "mlp.experts.gate_up": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.down": "mlp.experts.experts.linear_fc2.weight",
}
"""Our parameters of a layer, and what Megatron's own layers with Transformer Engine call them, where that differs."""

_ELSEWHERE: Final = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("pre_mlp_layernorm.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attention.q_layernorm.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attention.kv_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attention.linear_q_proj.weight",),
}
"""Other keys of the same in checkpoints of Megatron: of layers without Transformer Engine, or whose queries have
no low rank."""


def key(name: str) -> str:
    """The key of a parameter in a checkpoint."""
    layer, rest = _split(name)
    return layer + _KEYS.get(rest, rest)


def keys_elsewhere(key: str) -> tuple[str, ...]:
    """Further keys that a checkpoint of Megatron's may have it under."""
    layer, rest = _split(key)
    return tuple(layer + other for other in _ELSEWHERE.get(rest, ()))


def _split(name: str) -> tuple[str, str]:
    """ "decoder.layers.3." and the rest; ("", name) outside layers."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return "", name
    return ".".join(parts[:3]) + ".", ".".join(parts[3:])
