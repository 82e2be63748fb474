"""Qwen3.5's mixtures of experts as they are published: behind a vision tower, all experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from asyncrl.backends.families import qwen3_5, qwen3_5_moe, qwen3_5_vl
from asyncrl.backends.families.family import Family, softmax_experts
from asyncrl.backends.families.layer_weights import Row
from asyncrl.backends.families.shape import ModelShape

_FUSED: Final = {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}


def shape(config: Any) -> ModelShape:
    text = config.text_config
    return qwen3_5_vl.shape(
        config,
        experts=softmax_experts(text, gated_size=text.shared_expert_intermediate_size),
        module="qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel",
    )


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    for row in qwen3_5.layer(shape, layer, experts):
        yield (row[0], "expert_fused", (_FUSED[row[0]],)) if row[0] in _FUSED else row


FAMILY = Family(
    architecture="Qwen3_5MoeForConditionalGeneration",
    models="Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, text and images",
    shape=shape,
    only=qwen3_5_moe.FAMILY.only,
    layer=layer,
)
