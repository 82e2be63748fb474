"""GLM-4.5: half of every head is rotated, and experts are chosen as in DeepSeek-V3.

Multi-token-prediction layers are ignored: neither trained nor exported.
"""

from __future__ import annotations

from typing import Any

from asyncrl.backends.families.family import SIGMOID_ONLY, Family, decoder_shape, sigmoid_experts
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    return decoder_shape(
        config,
        has_qkv_bias=config.attention_bias,
        has_qk_norm=config.use_qk_norm,
        is_partly_rotated=True,
        experts=sigmoid_experts(config),
    )


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    shape=shape,
    only={**SIGMOID_ONLY, "attention_bias": (False, True)},
)
