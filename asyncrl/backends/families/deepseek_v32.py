"""DeepSeek-V3.2: DeepSeek-V3 whose queries see the tokens that an indexer chooses.

A sequence of at most index_topk tokens sees all of them. Up to that length, which is the model's context here, training
is exact; the indexer stays as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families import glm4_moe_lite
from asyncrl.backends.families.family import SIGMOID_ONLY, Family, Unsupported, layers_of
from asyncrl.backends.families.shape import Indexer, ModelShape


def shape(config: Any) -> ModelShape:
    layers = layers_of(config, "layer_types", kind="deepseek_sparse_attention", others=())
    if hasattr(config, "indexer_types"):
        layers = layers_of(config, "indexer_types", kind="full", others=("shared",))
    made = glm4_moe_lite.shape(config)
    assert made.latent is not None
    if not made.latent.query_rank:
        raise Unsupported("q_lora_rank = null: the indexer reads the latent of queries")
    indexer = Indexer(
        layers=layers,
        num_heads=config.index_n_heads,
        size=config.index_head_dim,
        chosen=config.index_topk,
    )
    return dataclasses.replace(made, latent=dataclasses.replace(made.latent, indexer=indexer))


FAMILY = Family(
    architecture="DeepseekV32ForCausalLM",
    models="DeepSeek-V3.2, once `asyncrl import-model` has turned its weights to bfloat16",
    shape=shape,
    only={**SIGMOID_ONLY, "rms_norm_eps": (1e-6,)},  # as in DeepSeek-V3
)
