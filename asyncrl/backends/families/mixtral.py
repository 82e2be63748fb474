"""Mixtral: the layers of Mistral with experts, under names of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape, only_experts
from asyncrl.backends.families.layer_weights import Row, attention
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    return decoder_shape(config, experts=only_experts(config))


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    mixture = "block_sparse_moe"
    yield from attention(shape)
    yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.router.weight", "whole", (f"{mixture}.gate.weight",))
    if shape.experts and shape.experts.has_bias:
        yield ("mlp.router.expert_bias", "whole", (f"{mixture}.e_score_correction_bias",))
    gate_up = tuple(f"{mixture}.experts.{expert}.{x}.weight" for expert in experts for x in ("w1", "w3"))
    yield ("mlp.experts.gate_up", "expert_gate_up", gate_up)
    yield ("mlp.experts.down", "expert_rows", tuple(f"{mixture}.experts.{expert}.w2.weight" for expert in experts))


FAMILY = Family(
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B and 8x22B",
    shape=shape,
    only={**DENSE_ONLY, "sliding_window": (None,)},
    layer=layer,
)
