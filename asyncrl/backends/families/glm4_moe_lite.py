"""GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3. config.json names the kind of each layer.

transformers always uses 1e-6 for the norms within attention; engines, and this family, use rms_norm_eps.
Multi-token-prediction layers are ignored: neither trained nor exported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families import deepseek_v3
from asyncrl.backends.families.family import SIGMOID_ONLY, Family, Unsupported
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    if unknown := sorted(set(config.mlp_layer_types) - {"dense", "sparse"}):
        raise Unsupported(f"mlp_layer_types = {unknown[0]!r}")
    made = deepseek_v3.shape(config)
    assert made.experts is not None
    dense = frozenset(layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "dense")
    return dataclasses.replace(made, experts=dataclasses.replace(made.experts, dense_layers=dense))


FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    shape=shape,
    only=SIGMOID_ONLY,
)
