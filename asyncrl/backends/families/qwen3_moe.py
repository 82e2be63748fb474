"""Qwen3's mixtures of experts: Qwen3 with many small feed-forward parts and a softmax router."""

from __future__ import annotations

from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape, refuse_one_expert
from asyncrl.backends.families.shape import Experts, ModelShape


def shape(config: Any) -> ModelShape:
    if config.norm_topk_prob:
        refuse_one_expert(config.num_experts_per_tok, key=" and norm_topk_prob = true")
    layers = range(config.num_hidden_layers)
    is_dense = {layer for layer in layers if (layer + 1) % config.decoder_sparse_step}
    experts = Experts(
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        feed_forward_size=config.moe_intermediate_size,
        is_normalized=config.norm_topk_prob,
        dense_layers=frozenset(is_dense | set(config.mlp_only_layers)),
    )
    return decoder_shape(config, has_qk_norm=True, experts=experts)


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    shape=shape,
    only=DENSE_ONLY,
)
