"""gpt-oss: attention with sinks, every second layer within a window, and experts with biases and a clamped gate.

Queries, keys, values and the output of attention have biases, too. In files, all experts of a layer are one
tensor, which has no low-rank adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from asyncrl.backends.families.family import DENSE_ONLY, Family, Unsupported, decoder_shape, only_experts
from asyncrl.backends.families.layer_weights import Row, attention
from asyncrl.backends.families.shape import LocalAttention, ModelShape

_LOCAL: Final = "sliding_attention"
_GLOBAL: Final = "full_attention"


def shape(config: Any) -> ModelShape:
    if unknown := sorted(set(config.layer_types) - {_LOCAL, _GLOBAL}):
        raise Unsupported(f"layer_types = {unknown[0]!r}")
    layers = frozenset(layer for layer, kind in enumerate(config.layer_types) if kind == _LOCAL)
    if layers and not config.sliding_window:
        raise Unsupported(f"sliding_window = {config.sliding_window!r} and layers of {_LOCAL}")
    return dataclasses.replace(
        decoder_shape(config, has_qkv_bias=True, experts=only_experts(config, are_biased=True)),
        has_output_bias=True,
        has_sinks=True,
        local=LocalAttention(layers=layers, window=config.sliding_window) if layers else None,
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
