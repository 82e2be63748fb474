"""MiniMax-M2: one norm over the queries of all heads and one over all keys; experts as in DeepSeek-V3 in every layer.

Half of every head is rotated. Engines take that from rotary_dim, transformers from rope_parameters; both must say it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families import mixtral
from asyncrl.backends.families.family import DENSE_ONLY, Family, Unsupported, decoder_shape, head_size, only_experts
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    part, size = config.rope_parameters.get("partial_rotary_factor", 1.0), head_size(config)
    rotated = getattr(config, "rotary_dim", size)
    if rotated != int(size * part):
        raise Unsupported(
            f"rotary_dim = {rotated}, which engines read, and partial_rotary_factor = {part} of {size}, which "
            "transformers reads; `asyncrl import-model` writes both"
        )
    if not all(getattr(config, "attn_type_list", None) or [1]):
        raise Unsupported("linear attention (a 0 in attn_type_list)")
    experts = dataclasses.replace(only_experts(config), scores="sigmoid", has_bias=True)
    made = decoder_shape(config, is_partly_rotated=True, experts=experts)
    return dataclasses.replace(made, has_qk_norm_of_all_heads=True)


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2 and M2.1, once `asyncrl import-model` has turned their weights to bfloat16",
    shape=shape,
    only={
        **DENSE_ONLY,
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "shared_intermediate_size": (0, None),
    },
    layer=mixtral.layer,
)
