"""Which Hugging Face tensors make which of a layer's parameters, and how Megatron cuts those over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from asyncrl.backends.families.shape import ModelShape

Cut = Literal["whole", "vocabulary", "rows", "qkv", "gate_up", "expert_rows", "expert_gate_up"]
"""How a parameter is split over tensor-parallel ranks, those of experts over expert-tensor-parallel ones.

whole           replicated
vocabulary      by rows, with the vocabulary padded to a multiple of the ranks
rows            by columns (Megatron's row-parallel)
qkv             by key-value groups, each being its queries, its key, its value
gate_up         gate and up by rows; a shard is its gate rows, then its up rows
expert_rows     rows of every expert, stacked: [experts, H, F]
expert_gate_up  gate_up of every expert, stacked: [experts, 2 F, H]; its tensors are gate, up, gate, up, ...
"""

Row = tuple[str, Cut, tuple[str, ...]]
"""A parameter, its cut, and the Hugging Face tensors that it is made of; names within the layer."""


class LayerWeights(Protocol):
    def __call__(self, shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
        """Every parameter of ``layer`` on a rank that holds ``experts``."""


def decoder_layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    """By the names that most families use."""
    yield from attention(shape)
    if shape.has_experts(layer):
        yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
        yield from mixture(experts)
    else:
        yield ("mlp.linear_fc1.layer_norm_weight", "whole", ("post_attention_layernorm.weight",))
        yield from feed_forward("mlp")


def attention(shape: ModelShape) -> Iterator[Row]:
    yield ("self_attention.linear_qkv.layer_norm_weight", "whole", ("input_layernorm.weight",))
    yield ("self_attention.linear_qkv.weight", "qkv", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"))
    yield ("self_attention.linear_proj.weight", "rows", ("self_attn.o_proj.weight",))
    if shape.has_qkv_bias:
        yield ("self_attention.linear_qkv.bias", "qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"))
    if shape.has_qk_norm:
        yield ("self_attention.q_layernorm.weight", "whole", ("self_attn.q_norm.weight",))
        yield ("self_attention.k_layernorm.weight", "whole", ("self_attn.k_norm.weight",))


def feed_forward(name: str) -> Iterator[Row]:
    """SwiGLU; ``name`` is the same on both sides."""
    yield (f"{name}.linear_fc1.weight", "gate_up", (f"{name}.gate_proj.weight", f"{name}.up_proj.weight"))
    yield (f"{name}.linear_fc2.weight", "rows", (f"{name}.down_proj.weight",))


def mixture(experts: range) -> Iterator[Row]:
    """The router and the rank's experts, all of which are two parameters."""
    yield ("mlp.router.weight", "whole", ("mlp.gate.weight",))
    gate_up = tuple(f"mlp.experts.{expert}.{x}_proj.weight" for expert in experts for x in ("gate", "up"))
    yield ("mlp.experts.gate_up", "expert_gate_up", gate_up)
    yield ("mlp.experts.down", "expert_rows", tuple(f"mlp.experts.{e}.down_proj.weight" for e in experts))
