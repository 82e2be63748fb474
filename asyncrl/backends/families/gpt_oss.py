"""gpt-oss: attention with sinks, every second layer within a window, and experts with biases and a clamped gate.

Queries, keys, values and the output of attention have biases, too. In files, all experts of a layer are one
tensor, which has no low-rank adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape, local_attention, only_experts
from asyncrl.backends.families.layer_weights import Row, attention
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    return dataclasses.replace(
        decoder_shape(config, has_qkv_bias=True, experts=only_experts(config, are_biased=True)),
        has_output_bias=True,
        has_sinks=True,
        local=local_attention(config),
    )


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    yield from attention(shape)
    yield ("self_attention.linear_proj.bias", "whole", ("self_attn.o_proj.bias",))
    yield ("self_attention.sinks", "heads", ("self_attn.sinks",))
    yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.router.weight", "whole", ("mlp.router.weight",))
    yield ("mlp.router.bias", "whole", ("mlp.router.bias",))
    yield ("mlp.experts.gate_up", "expert_fused_gate_up", ("mlp.experts.gate_up_proj",))
    yield ("mlp.experts.gate_up_bias", "expert_fused_gate_up", ("mlp.experts.gate_up_proj_bias",))
    yield ("mlp.experts.down", "expert_fused_rows", ("mlp.experts.down_proj",))
    yield ("mlp.experts.down_bias", "expert_fused_rows", ("mlp.experts.down_proj_bias",))


FAMILY = Family(
    architecture="GptOssForCausalLM",
    models="gpt-oss-20b and gpt-oss-120b, once `asyncrl import-model` has turned their weights to bfloat16",
    shape=shape,
    only={
        **DENSE_ONLY,
        "attention_bias": (True,),
        "hidden_act_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    layer=layer,
)
