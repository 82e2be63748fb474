"""Qwen2's mixtures of experts: Qwen2 with a softmax router and a shared expert, whose output has a sigmoid gate."""

from __future__ import annotations

from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape, softmax_experts
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    experts = softmax_experts(config, gated_size=config.shared_expert_intermediate_size)
    return decoder_shape(config, has_qkv_bias=config.qkv_bias, experts=experts)


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    shape=shape,
    only=DENSE_ONLY,
)
