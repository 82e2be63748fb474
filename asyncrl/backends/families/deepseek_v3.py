"""DeepSeek-V3: latent attention, and experts chosen by sigmoid scores plus a bias.

Multi-token-prediction layers are trained with learner.options.draft_coefficient, and else neither read nor exported.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from asyncrl.backends.families.family import (
    SIGMOID_ONLY,
    Family,
    Unsupported,
    decoder_shape,
    num_draft_layers,
    sigmoid_experts,
)
from asyncrl.backends.families.layer_weights import draft_layer
from asyncrl.backends.families.shape import LatentAttention, ModelShape


def shape(config: Any) -> ModelShape:
    latent = LatentAttention(
        query_rank=config.q_lora_rank or 0,
        key_value_rank=config.kv_lora_rank,
        plain_size=config.qk_nope_head_dim,
        rotary_size=config.qk_rope_head_dim,
        value_size=config.v_head_dim,
        score_scale=_score_scale(config.rope_parameters),
    )
    made = decoder_shape(config, experts=sigmoid_experts(config))
    size = latent.plain_size + latent.rotary_size
    if latent.value_size > size:  # values are padded to the size of keys
        raise Unsupported(f"v_head_dim = {latent.value_size}, more than qk_nope_head_dim + qk_rope_head_dim = {size}")
    return dataclasses.replace(
        made,
        latent=latent,
        head_size=size,
        is_interleaved=getattr(config, "rope_interleave", True),
        num_draft_layers=num_draft_layers(config),
    )


def _score_scale(rope: dict[str, Any]) -> float:
    """Return YaRN's score scale as in DeepSeek's code: the square of 0.1 x mscale_all_dim x ln(factor) + 1."""
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return float((0.1 * rope["mscale_all_dim"] * math.log(max(rope["factor"], 1.0)) + 1.0) ** 2)


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, DeepSeek-R1, Moonlight and Kimi-K2 (with model.trust_remote_code for its tokenizer), once "
    "`asyncrl import-model` has turned their weights to bfloat16",
    shape=shape,
    # transformers always uses 1e-6 for the norms in attention; engines use the value in config.json
    only={**SIGMOID_ONLY, "rms_norm_eps": (1e-6,)},
    draft_layer=draft_layer,
)
