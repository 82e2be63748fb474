"""Gemma 3 (text).

Most layers see a window of tokens and have their own rotary frequencies. The attention and feed-forward parts have
norms before and after them, all zero-centred. The gate is a GELU. Embeddings are scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.backends.families.family import (
    DENSE_ONLY,
    GLOBAL,
    LOCAL,
    Family,
    Unsupported,
    decoder_shape,
    head_size,
    local_attention,
    plain_rope,
)
from asyncrl.backends.families.layer_weights import Row, attention, feed_forward
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    return dataclasses.replace(
        decoder_shape(config, has_qk_norm=True, rotary=(_rope_of(config, GLOBAL), 1.0)),
        has_post_norms=True,
        has_zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(config.hidden_size),
        query_scale=math.sqrt(head_size(config) / config.query_pre_attn_scalar),
        local=local_attention(config, rope_frequencies=_rope_of(config, LOCAL)),
    )


def _rope_of(config: Any, kind: str) -> torch.Tensor:
    """Return the frequencies of one kind of layer. Supports default and linear rope, which have no scale.

    SGLang ignores the factor of linear rope.
    """
    parameters = config.rope_parameters[kind]
    if parameters["rope_type"] not in ("default", "linear"):
        raise Unsupported(f"rope type {parameters['rope_type']!r}; supported: default, linear")
    factor: float = parameters.get("factor", 1.0) if parameters["rope_type"] == "linear" else 1.0
    return plain_rope(parameters["rope_theta"], head_size(config)) / factor


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    yield from attention(shape)
    yield ("self_attention.linear_proj.post_norm", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.linear_fc1.layer_norm_weight", "whole", ("pre_feedforward_layernorm.weight",))
    yield from feed_forward("mlp")
    yield ("mlp.linear_fc2.post_norm", "whole", ("post_feedforward_layernorm.weight",))


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 270M and 1B, and the text part of larger ones with the in-process engine",
    shape=shape,
    only={
        **DENSE_ONLY,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    layer=layer,
)
