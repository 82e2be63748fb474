"""Where each rank's part lies in the whole parameter; checkpoints of any layout are built from these places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.backends import huggingface, weight_cuts, weight_places
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.weight_map import Part, weight_map
from tests.harness.families import make_tiny_family


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_flat_range_is_covered_by_few_rectangles(sizes: list[int], data: st.DataObject) -> None:
    numbers = torch.arange(math.prod(sizes)).view(sizes)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    parts = list(weight_places.rectangles(start, stop, sizes))
    found = [numbers[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))].reshape(-1) for part in parts]
    assert torch.cat([numbers.new_empty(0), *found]).tolist() == list(range(start, stop))
    assert len(parts) <= 2 * len(sizes) - 1


def shape_of(folder: Path, architecture: str) -> ModelShape:
    make_tiny_family(folder, architecture=architecture)
    return huggingface.read_shape(folder)


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "glm4", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5", "deepseek_v3", "minimax_m2", "gpt_oss"],
)
def test_parts_of_all_ranks_reassemble_the_whole(tmp_path: Path, architecture: str) -> None:
    """For every kind of cut, any number of cuts, and any split of the elements among copies of the model."""
    shape = shape_of(tmp_path, architecture)
    require_whole(list(shards_of_two_ranks(tmp_path, shape)))


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3"])
def test_parts_of_ranks_that_share_experts_reassemble_the_whole(tmp_path: Path, architecture: str) -> None:
    require_whole(list(shards_of_two_ranks(tmp_path, shape_of(tmp_path, architecture), shares_experts=True)))


def require_whole(shards: Sequence[tuple[weight_places.Place, torch.Tensor]]) -> None:
    wholes: dict[str, torch.Tensor] = {}
    for place, shard in shards:
        whole = wholes.setdefault(place.key, torch.full(place.whole, torch.nan))
        middle = shard.numel() // 3  # two copies of the model hold parts of unequal size
        for start, flat in ((0, shard.reshape(-1)[:middle]), (middle, shard.reshape(-1)[middle:])):
            for view, corner in place.views(flat, start):
                whole[slices(corner, view)] = view
    assert not any(whole.isnan().any() for whole in wholes.values())
    for place, shard in shards:
        back = torch.zeros_like(shard)  # padding is zero
        for view, corner in place.views(back.view(-1)):
            view.copy_(wholes[place.key][slices(corner, view)])
        assert torch.equal(back, shard), place.key


def shards_of_two_ranks(
    folder: Path, shape: ModelShape, *, shares_experts: bool = False
) -> Iterator[tuple[weight_places.Place, torch.Tensor]]:
    """Each rank has half of every matrix, and half of the experts or of every expert."""
    experts = shape.experts.num_experts if shape.experts else 0
    halves = (range(experts // 2), range(experts // 2, experts))
    with huggingface.open_weights(folder) as read:
        for rank, held in enumerate([range(experts)] * 2 if shares_experts else halves):
            for entry in weight_map(shape, part=Part(layers=range(shape.num_layers), experts=held)):
                ranks = 1 if entry.is_of_experts and not shares_experts else 2
                parts = [read(name) for name in entry.huggingface]
                parts = [part[held.start : held.stop] for part in parts] if entry.is_fused else parts
                shard = weight_cuts.fuse(parts, entry.cut, shape, tensor_parallel=ranks)[rank % ranks]
                first = held.start
                place = weight_places.place(
                    entry.megatron, entry.cut, shard.shape, shape, ranks=ranks, rank=rank % ranks, first_expert=first
                )
                yield place, shard.contiguous()


def slices(corner: Sequence[int], view: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(corner, view.shape, strict=True))


def test_keys_are_those_of_megatron() -> None:
    assert weight_places.key("decoder.layers.3.mlp.experts.down") == (
        "decoder.layers.3.mlp.experts.experts.linear_fc2.weight"
    )
    assert weight_places.key("output_layer.weight") == "output_layer.weight"
    assert weight_places.keys_elsewhere("decoder.layers.3.mlp.linear_fc1.layer_norm_weight") == (
        "decoder.layers.3.pre_mlp_layernorm.weight",
    )
