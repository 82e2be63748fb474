"""Qwen3.5's mixtures of experts (text): Qwen3.5 with the experts of Qwen3-Next in every layer.

`asyncrl import-model` writes the text part of a published model.
"""

from __future__ import annotations

from typing import Any

from asyncrl.backends.families import qwen3_5
from asyncrl.backends.families.family import Family, refuse_one_expert
from asyncrl.backends.families.qwen3_next import hybrid
from asyncrl.backends.families.shape import Experts, ModelShape


def shape(config: Any) -> ModelShape:
    refuse_one_expert(config.num_experts_per_tok)
    experts = Experts(
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        feed_forward_size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        has_shared_gate=True,
        is_normalized=True,
    )
    return hybrid(config, experts)


FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B (text)",
    shape=shape,
    only=qwen3_5.FAMILY.only,
    layer=qwen3_5.layer,
)
