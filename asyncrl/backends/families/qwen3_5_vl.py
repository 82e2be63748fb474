"""Qwen3.5 as it is published: the text model behind a vision tower.

Layouts, kernels and multi-token-prediction layers are as on Qwen3.5's page. The tower is frozen unless
learner.train_vision is set, and every version has it, so that SGLang serves the model by the names of the published
folder. Prompts may show images. SGLang needs a GPU for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families import qwen3_5, qwen3_next, qwen3_vl
from asyncrl.backends.families.family import Family
from asyncrl.backends.families.shape import Experts, ModelShape
from asyncrl.backends.families.vision import decoder_config, interleaved, tower


def shape(
    config: Any,
    *,
    experts: Experts | None = None,
    module: str = "qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel",
) -> ModelShape:
    made, rope = qwen3_next.hybrid(decoder_config(config), experts), config.text_config.rope_parameters
    return dataclasses.replace(
        made,
        rope_axes=interleaved(rope.get("mrope_section", (11, 11, 10)), len(made.rope_frequencies)),
        vision=tower(
            config.vision_config,
            qwen3_vl.tower_weights(config.vision_config, num_layer_features=0),
            module=module,
            prefix="model.visual.",
            feed_forward_matrices=2,
        ),
        prefix="model.language_model.",
    )


FAMILY = Family(
    architecture="Qwen3_5ForConditionalGeneration",
    models="Qwen3.5 0.8B to 27B, text and images",
    shape=shape,
    only=qwen3_5.FAMILY.only,
    layer=qwen3_5.layer,
)
