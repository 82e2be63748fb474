"""Qwen3-VL's mixtures of experts: Qwen3-VL whose files hold all experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families import qwen3_vl
from asyncrl.backends.families.family import DENSE_ONLY, Family, Unsupported, softmax_experts
from asyncrl.backends.families.layer_weights import Row, attention, feed_forward
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    text = config.text_config
    if text.hidden_size == 2 * text.moe_intermediate_size:  # transformers tells by the shape how a file holds experts
        raise Unsupported(f"moe_intermediate_size = {text.moe_intermediate_size}, half of hidden_size")
    module = "qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel"
    return qwen3_vl.shape(config, experts=softmax_experts(text), module=module)


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    """In a file gate and up of an expert are [H, 2 F], gate first: transposed, they are ours."""
    yield from attention(shape)
    if not shape.has_experts(layer):
        yield ("mlp.linear_fc1.layer_norm_weight", "whole", ("post_attention_layernorm.weight",))
        yield from feed_forward("mlp")
        return
    yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.router.weight", "whole", ("mlp.gate.weight",))
    yield ("mlp.experts.gate_up", "expert_fused_rows", ("mlp.experts.gate_up_proj",))
    yield ("mlp.experts.down", "expert_fused_rows", ("mlp.experts.down_proj",))


FAMILY = Family(
    architecture="Qwen3VLMoeForConditionalGeneration",
    models="Qwen3-VL-30B-A3B and 235B-A22B, images only",
    shape=shape,
    only={**DENSE_ONLY, "norm_topk_prob": (True,)},
    layer=layer,
)
