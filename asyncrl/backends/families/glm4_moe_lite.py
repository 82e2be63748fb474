"""GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3. config.json names the kind of each layer.

transformers always uses 1e-6 for the norms within attention; engines, and this family, use rms_norm_eps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families import deepseek_v3
from asyncrl.backends.families.family import SIGMOID_ONLY, Family, layers_of
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    made = deepseek_v3.shape(config)
    assert made.experts is not None
    dense = layers_of(config, "mlp_layer_types", kind="dense", others=("sparse",))
    return dataclasses.replace(made, experts=dataclasses.replace(made.experts, dense_layers=dense))


FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    shape=shape,
    only=SIGMOID_ONLY,
)
