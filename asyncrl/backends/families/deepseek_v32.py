"""DeepSeek-V3.2: DeepSeek-V3 whose queries see the index_topk tokens that an indexer chooses (arXiv:2512.02556).

The learner chooses by scores in float32, and its indexer stays as it is. Engines round the indexer's queries and keys
to FP8, so where scores are close they choose other tokens (docs/guides/scaling.md, "Sparse attention").
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
    if 0 not in layers:
        raise Unsupported("a first layer that uses the choice of a layer before it")
    if config.index_head_dim < made.latent.rotary_size:
        raise Unsupported(f"index_head_dim = {config.index_head_dim}, less than qk_rope_head_dim")
    indexer = Indexer(
        layers=layers,
        num_heads=config.index_n_heads,
        size=config.index_head_dim,
        chosen=config.index_topk,
        is_interleaved=bool(getattr(config, "indexer_rope_interleave", False)),  # as SGLang: transformers may ignore it
    )
    return dataclasses.replace(made, latent=dataclasses.replace(made.latent, indexer=indexer))


CHOICE = {"index_k_norm_type": ("layer",), "index_kpool": (1,), "index_init_tokens": (0,), "index_local_tokens": (0,)}
"""Keys that change the indexer in SGLang, with the values under which it is this one."""

FAMILY = Family(
    architecture="DeepseekV32ForCausalLM",
    models="DeepSeek-V3.2, once `asyncrl import-model` has turned its weights to bfloat16",
    shape=shape,
    only={**SIGMOID_ONLY, **CHOICE, "rms_norm_eps": (1e-6,)},  # as in DeepSeek-V3
)
