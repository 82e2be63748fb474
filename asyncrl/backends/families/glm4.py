"""GLM-4 of April 2025.

Attention and feed-forward part also have a norm after them. Half of every head is rotated, in pairs of neighbours. The
names of a layer's norms differ from other families, and gate and up are one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape
from asyncrl.backends.families.layer_weights import Row, attention
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    made = decoder_shape(config, has_qkv_bias=config.attention_bias, is_partly_rotated=True)
    return dataclasses.replace(made, is_interleaved=True, has_post_norms=True)


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    yield from attention(shape)
    yield ("self_attention.linear_proj.post_norm", "whole", ("post_self_attn_layernorm.weight",))
    yield ("mlp.linear_fc1.layer_norm_weight", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.linear_fc1.weight", "gate_then_up", ("mlp.gate_up_proj.weight",))
    yield ("mlp.linear_fc2.weight", "rows", ("mlp.down_proj.weight",))
    yield ("mlp.linear_fc2.post_norm", "whole", ("post_mlp_layernorm.weight",))


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
    shape=shape,
    only={**DENSE_ONLY, "attention_bias": (False, True)},
    layer=layer,
)
