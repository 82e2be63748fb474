"""Converts Hugging Face tensors to the shards of one Megatron parameter, and back.

Tensor parallelism is only a number here, so tests need no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.backends.families.layer_weights import Cut
from asyncrl.backends.families.shape import ModelShape
from asyncrl.errors import ConfigError


def require_divisible(shape: ModelShape, tensor_parallel: int, *, where: str = "model.path") -> None:
    """Raise ConfigError if the model cannot be split over ``tensor_parallel`` ranks."""
    whose = "the model" if where == "model.path" else f"the {where.removesuffix('.path')}"
    if padded_vocabulary(shape, tensor_parallel) // tensor_parallel * (tensor_parallel - 1) >= shape.vocabulary_size:
        raise ConfigError(
            f"learner.tensor_parallel: {whose}'s vocabulary of {shape.vocabulary_size} leaves the last of "
            f"{tensor_parallel} ranks without a token; use fewer ranks"
        )
    heads, keys = ("num_attention_heads", shape.num_heads), ("num_key_value_heads", shape.num_key_value_heads)
    is_all_sparse = all(shape.has_experts(layer) for layer in range(shape.num_layers))  # experts are not cut
    for what, number in (
        heads if shape.latent else keys,
        ("linear_num_key_heads", shape.linear.num_key_heads if shape.linear else 0),
        ("intermediate_size", 0 if is_all_sparse else shape.feed_forward_size),
        ("shared expert's size", shape.experts.shared_size if shape.experts else 0),
    ):
        if number % tensor_parallel:
            raise ConfigError(f"learner.tensor_parallel: {tensor_parallel} does not divide {whose}'s {what}, {number}")


def padded_vocabulary(shape: ModelShape, tensor_parallel: int) -> int:
    """Return the vocabulary size padded to a multiple of the ranks. Padding rows never contribute to a logprob."""
    return -(-shape.vocabulary_size // tensor_parallel) * tensor_parallel


def fuse(parts: Sequence[torch.Tensor], cut: Cut, shape: ModelShape, *, tensor_parallel: int) -> list[torch.Tensor]:
    """Convert Hugging Face tensors to one Megatron shard per tensor-parallel rank.

    Fused experts are never cut: give the rows of the experts that a rank holds.
    """
    if cut == "whole":
        return [parts[0]] * tensor_parallel
    if cut == "vocabulary":
        padding = padded_vocabulary(shape, tensor_parallel) - parts[0].shape[0]
        padded = torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].shape[1])]) if padding else parts[0]
        return list(padded.chunk(tensor_parallel))
    if cut == "rows":
        return list(parts[0].chunk(tensor_parallel, dim=1))
    if cut == "heads":
        return list(parts[0].chunk(tensor_parallel))
    if cut == "gate_then_up":
        return fuse(parts[0].chunk(2), "gate_up", shape, tensor_parallel=tensor_parallel)
    if cut == "gate_up":
        pairs = zip(*(part.chunk(tensor_parallel) for part in parts), strict=True)
        return [torch.cat(pair) for pair in pairs]
    if cut in ("expert_rows", "expert_gate_up"):
        one: Cut = "rows" if cut == "expert_rows" else "gate_up"
        size = _TENSORS_OF_AN_EXPERT[one]
        experts = [parts[first : first + size] for first in range(0, len(parts), size)]
        shards = zip(*(fuse(expert, one, shape, tensor_parallel=tensor_parallel) for expert in experts), strict=True)
        return [torch.stack(shard) for shard in shards]
    if cut == "expert_fused":
        return [parts[0]]
    if cut == "expert_fused_rows":
        return [_transpose(parts[0])]
    if cut == "expert_fused_gate_up":
        mixed = _transpose(parts[0])
        return [torch.cat([mixed[:, ::2], mixed[:, 1::2]], dim=1)]
    groups, _ = groups_of(cut, shape)
    if cut == "gated_qkv":
        parts = [_swap_order(parts[0], shape, (-1, 2)), *parts[1:]]
    elif cut in ("delta_parts", "delta_kernels"):
        parts = [_by_key_head(parts[0], shape), *parts[1:]]
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(tensor_parallel))


_TENSORS_OF_AN_EXPERT = {"rows": 1, "gate_up": 2}


def unfuse(shards: Sequence[torch.Tensor], cut: Cut, shape: ModelShape) -> list[torch.Tensor]:
    """Invert ``fuse``: convert all shards of a Megatron tensor to Hugging Face tensors, as views if possible."""
    if cut in ("whole", "expert_fused"):
        return [shards[0]]
    if cut == "vocabulary":
        return [_concatenate(shards)[: shape.vocabulary_size]]
    if cut == "rows":
        return [_concatenate(shards, dim=1)]
    if cut == "heads":
        return [_concatenate(shards)]
    if cut in ("stacked", "expert_stacked"):
        return list(shards[0].flatten(0, -3).unbind())
    if cut == "stacked_rows":
        return list(_concatenate(shards, dim=2).unbind())
    if cut == "gate_then_up":
        return [_concatenate(unfuse(shards, "gate_up", shape))]
    if cut == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [_concatenate([half[part] for half in halves]) for part in (0, 1)]
    if cut in ("expert_rows", "expert_gate_up"):
        one: Cut = "rows" if cut == "expert_rows" else "gate_up"
        return [tensor for expert in zip(*shards, strict=True) for tensor in unfuse(expert, one, shape)]
    if cut == "expert_fused_rows":
        return [_transpose(shards[0])]
    if cut == "expert_fused_gate_up":
        return [_transpose(torch.stack(shards[0].chunk(2, dim=1), dim=2).flatten(1, 2))]
    whole, (groups, sizes) = _concatenate(shards), groups_of(cut, shape)
    parts = torch.split(whole.reshape(groups, -1, *whole.shape[1:]), sizes, dim=1)
    tensors = [part.flatten(0, 1) for part in parts]
    if cut == "gated_qkv":
        return [_swap_order(tensors[0], shape, (2, -1)), *tensors[1:]]
    if cut in ("delta_parts", "delta_kernels"):
        return [_by_kind(tensors[0], shape), *tensors[1:]]
    return tensors


def groups_of(cut: Cut, shape: ModelShape) -> tuple[int, list[int]]:
    """Return how many groups of heads a parameter has, and how many rows of each tensor there are in a group."""
    if cut in ("delta_heads", "delta_parts", "delta_kernels"):
        assert shape.linear is not None
        convolved, values = sum(shape.linear.convolved_sizes), shape.linear.convolved_sizes[-1]
        numbers = shape.linear.values_per_key
        sizes = {
            "delta_heads": [convolved + values, 2 * numbers],
            "delta_parts": [convolved, values, numbers, numbers],
            "delta_kernels": [convolved],
        }
        return shape.linear.num_key_heads, sizes[cut]
    queries = shape.num_heads // shape.num_key_value_heads * shape.head_size
    queries *= 2 if cut == "gated_qkv" else 1
    return shape.num_key_value_heads, [queries, shape.head_size, shape.head_size]


def _swap_order(queries: torch.Tensor, shape: ModelShape, order: tuple[int, int]) -> torch.Tensor:
    """Swap the order of queries and gates within each group: (-1, 2) by head, (2, -1) all queries before all gates."""
    by_group = queries.view(shape.num_key_value_heads, *order, shape.head_size, *queries.shape[1:])
    return by_group.transpose(1, 2).reshape(queries.shape)


def _by_key_head(whole: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Put the rows of all queries, all keys, all values of linear attention in the order of key heads."""
    assert shape.linear is not None
    heads = shape.linear.num_key_heads
    parts = torch.split(whole, [heads * size for size in shape.linear.convolved_sizes])
    return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _by_kind(whole: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Invert ``_by_key_head``."""
    assert shape.linear is not None
    grouped = whole.reshape(shape.linear.num_key_heads, -1, *whole.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in torch.split(grouped, list(shape.linear.convolved_sizes), dim=1)])


def _transpose(experts: torch.Tensor) -> torch.Tensor:
    """Swap input and output of every expert's matrix; biases have only an output."""
    return experts.transpose(1, 2) if experts.ndim == 3 else experts


def _concatenate(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
