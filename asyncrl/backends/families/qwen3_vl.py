"""Qwen3-VL: Qwen3 behind a vision tower.

Time, height and width take turns among a head's frequencies. The first layers also get features from the middle of the
tower (DeepStack).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape
from asyncrl.backends.families.shape import Experts, ModelShape
from asyncrl.backends.families.vision import decoder_config, interleaved, tower


def shape(
    config: Any,
    *,
    experts: Experts | None = None,
    module: str = "qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
) -> ModelShape:
    made = decoder_shape(decoder_config(config), has_qk_norm=True, experts=experts)
    vision = config.vision_config
    return dataclasses.replace(
        made,
        rope_axes=interleaved(
            config.text_config.rope_parameters.get("mrope_section", (24, 20, 20)), len(made.rope_frequencies)
        ),
        vision=tower(
            vision,
            tower_weights(vision, num_layer_features=len(vision.deepstack_visual_indexes)),
            module=module,
            prefix="model.visual.",
            feed_forward_matrices=2,
            num_layer_features=len(vision.deepstack_visual_indexes),
        ),
        prefix="model.language_model.",
    )


def tower_weights(vision: Any, *, num_layer_features: int) -> Iterator[str]:
    yield "pos_embed.weight"
    modules = ["patch_embed.proj"]
    for block in range(vision.depth):
        names = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        modules += [f"blocks.{block}.{name}" for name in names]
    for merger in ("merger", *(f"deepstack_merger_list.{number}" for number in range(num_layer_features))):
        modules += [f"{merger}.{name}" for name in ("norm", "linear_fc1", "linear_fc2")]
    yield from (f"{module}.{what}" for module in modules for what in ("weight", "bias"))


FAMILY = Family(
    architecture="Qwen3VLForConditionalGeneration",
    models="Qwen3-VL 2B to 32B, images only",
    shape=shape,
    only=DENSE_ONLY,
)
