"""GLM-4.5: half of every head is rotated, and experts are chosen as in DeepSeek-V3.

Multi-token-prediction layers are trained with learner.options.draft_coefficient, and else neither read nor exported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families.family import SIGMOID_ONLY, Family, decoder_shape, num_draft_layers, sigmoid_experts
from asyncrl.backends.families.layer_weights import draft_layer
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    made = decoder_shape(
        config,
        has_qkv_bias=config.attention_bias,
        has_qk_norm=config.use_qk_norm,
        is_partly_rotated=True,
        experts=sigmoid_experts(config),
    )
    return dataclasses.replace(made, num_draft_layers=num_draft_layers(config))


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    shape=shape,
    only={**SIGMOID_ONLY, "attention_bias": (False, True)},
    draft_layer=draft_layer,
)
