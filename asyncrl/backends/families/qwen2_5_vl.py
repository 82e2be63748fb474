"""Qwen2.5-VL: Qwen2.5 behind a vision tower; time, height and width each turn a section of a head's frequencies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.families.vision import decoder_config, sections, tower


def shape(config: Any) -> ModelShape:
    made, vision = decoder_shape(decoder_config(config), has_qkv_bias=True), config.vision_config
    return dataclasses.replace(
        made,
        rope_axes=sections(config.text_config.rope_parameters["mrope_section"], len(made.rope_frequencies)),
        vision=tower(
            vision,
            tower_weights(vision),
            module="qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
            prefix="visual.",
            feed_forward_matrices=3,
            num_windowed=vision.depth - len(vision.fullatt_block_indexes),
            window=(vision.window_size // vision.patch_size) ** 2,
        ),
    )


def tower_weights(vision: Any) -> Iterator[str]:
    yield "patch_embed.proj.weight"
    for block in range(vision.depth):
        yield from (f"blocks.{block}.norm{number}.weight" for number in (1, 2))
        for linear in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            yield from (f"blocks.{block}.{linear}.{what}" for what in ("weight", "bias"))
    yield "merger.ln_q.weight"
    yield from (f"merger.mlp.{number}.{what}" for number in (0, 2) for what in ("weight", "bias"))


FAMILY = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    models="Qwen2.5-VL 3B to 72B, images only",
    shape=shape,
    only=DENSE_ONLY,
)
