"""The description of a model family, and the config.json parsing that most families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrl.backends.families.layer_weights import LayerWeights, decoder_layer
from asyncrl.backends.families.shape import Experts, LocalAttention, ModelShape

LOCAL: Final = "sliding_attention"
GLOBAL: Final = "full_attention"
"""Kinds of attention in layer_types of config.json."""

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")

DENSE_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu",),
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
}
"""Supported values that most families have in common; see Family.only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers.

    architecture  name in config.json
    models        published models, for messages and documentation
    shape         function from a config to its shape; raises Unsupported
    only          keys of config.json with the supported values of each; other values would be silently wrong
    layer         the weights of one layer
    specification  function from Megatron's TransformerConfig and the shape to the TransformerBlockSubmodules of all
                  layers, for layers that asyncrl does not have: any module that Megatron builds, or one that wraps a
                  module of transformers. None: asyncrl's own layers. A layer gets (hidden_states [n, 1, H],
                  packed_seq_params=RowParameters) and returns hidden states and None (megatron/layers.py)
    draft_layer   the weights of one multi-token-prediction layer; None: the family has none that is trained
    """

    architecture: str
    models: str
    shape: Callable[[Any], ModelShape]
    only: Mapping[str, tuple[Any, ...]]
    layer: LayerWeights = decoder_layer
    specification: Callable[[Any, ModelShape], Any] | None = None
    draft_layer: LayerWeights | None = None


class Unsupported(ValueError):
    """An unsupported feature of a model. Its text continues the sentence "does not support QwenX with"."""


def decoder_shape(
    config: Any,
    *,
    has_qkv_bias: bool = False,
    has_qk_norm: bool = False,
    is_partly_rotated: bool = False,
    experts: Experts | None = None,
    rotary: tuple[torch.Tensor, float] | None = None,
) -> ModelShape:
    """Return the shape of a decoder with grouped-query attention, from the keys that most families use in config.json.

    is_partly_rotated  the model's code in transformers reads partial_rotary_factor; other families ignore this key
    rotary             frequencies and scale, for families with other keys for them
    """
    frequencies, rope_scale = rotary or rope(config, is_partial=is_partly_rotated)
    return ModelShape(
        architecture=config.architectures[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        feed_forward_size=getattr(config, "intermediate_size", 0),  # none if all layers have experts
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_size=head_size(config),
        vocabulary_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        is_tied=config.tie_word_embeddings,
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
        rope_frequencies=frequencies,
        rope_scale=rope_scale,
        experts=experts,
    )


def num_draft_layers(config: Any) -> int:
    """Return how many multi-token-prediction layers follow the model's, as DeepSeek-V3 and GLM-4.5 name them."""
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def layers_of(config: Any, key: str, *, kind: str, others: Sequence[str]) -> frozenset[int]:
    """Return the layers that the list ``key`` of config.json calls ``kind``. Raises Unsupported.

    others: further kinds that it may name
    """
    kinds: list[str] = getattr(config, key)
    if unknown := sorted(set(kinds) - {kind, *others}):
        raise Unsupported(f"{key} = {unknown[0]!r}")
    return frozenset(layer for layer, one in enumerate(kinds) if one == kind)


def local_attention(config: Any, *, rope_frequencies: torch.Tensor | None = None) -> LocalAttention | None:
    """Return sliding-window attention as layer_types and sliding_window describe it; None if no layer has it.

    Raises Unsupported.
    """
    layers = layers_of(config, "layer_types", kind=LOCAL, others=(GLOBAL,))
    if not layers:
        return None
    if not config.sliding_window:
        raise Unsupported(f"sliding_window = {config.sliding_window!r} and layers of {LOCAL}")
    return LocalAttention(layers=layers, window=config.sliding_window, rope_frequencies=rope_frequencies)


def softmax_experts(config: Any, *, gated_size: int = 0) -> Experts:
    """Return experts like Qwen's, from its keys in config.json, of which newer models have fewer. Raises Unsupported.

    gated_size  intermediate size of a shared expert with a gate; 0 if there is none
    """
    is_normalized = getattr(config, "norm_topk_prob", True)
    if is_normalized:
        refuse_one_expert(config.num_experts_per_tok, key=" and norm_topk_prob = true")
    step = getattr(config, "decoder_sparse_step", 1)
    is_dense = {layer for layer in range(config.num_hidden_layers) if (layer + 1) % step}
    return Experts(
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        feed_forward_size=config.moe_intermediate_size,
        shared_size=gated_size,
        has_shared_gate=gated_size > 0,
        is_normalized=is_normalized,
        dense_layers=frozenset(is_dense | set(getattr(config, "mlp_only_layers", ()))),
    )


def only_experts(config: Any, *, are_biased: bool = False) -> Experts:
    """Return experts like Mixtral's, which are all that follows attention in every layer. Raises Unsupported."""
    refuse_one_expert(config.num_experts_per_tok)
    return Experts(
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        feed_forward_size=config.intermediate_size,
        is_normalized=True,
        are_biased=are_biased,
    )


def sigmoid_experts(config: Any) -> Experts:
    """Return experts like DeepSeek-V3's, from its keys in config.json. Raises Unsupported."""
    chosen, groups, best_groups = config.num_experts_per_tok, config.n_group, config.topk_group
    refuse_one_expert(chosen, key=" and norm_topk_prob = true")
    has_groups = groups > best_groups
    if has_groups and chosen != 2 * best_groups:  # transformers always scores a group by its best two experts
        raise Unsupported(
            f"num_experts_per_tok = {chosen} of topk_group = {best_groups} groups: Megatron scores a group by its best "
            f"{chosen} // {best_groups} experts and engines by its best 2"
        )
    return Experts(
        num_experts=config.n_routed_experts,
        experts_per_token=chosen,
        feed_forward_size=config.moe_intermediate_size,
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        scores="sigmoid",
        is_normalized=True,
        scale=config.routed_scaling_factor,
        has_bias=True,
        num_groups=groups if has_groups else 1,
        groups_per_token=best_groups if has_groups else 1,
        dense_layers=frozenset(range(getattr(config, "first_k_dense_replace", 0))),
    )


def refuse_one_expert(experts_per_token: int, *, key: str = "") -> None:
    """Raise Unsupported for one expert per token with a normalised score, which is 1 for every token.

    Megatron does not normalise the score of a single expert, or refuses such a router.
    key: what config.json says of normalised scores, if it has a key for that
    """
    if experts_per_token == 1:
        raise Unsupported(
            f"num_experts_per_tok = 1{key}: Megatron does not normalise a single score; "
            'learner.backend = "reference" does'
        )


SIGMOID_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    **DENSE_ONLY,
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Family.only for families that use ``sigmoid_experts``."""


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope(config: Any, *, is_partial: bool = False) -> tuple[torch.Tensor, float]:
    """Return frequencies and scale, computed by transformers. Raises Unsupported.

    For yarn this uses attention_factor and ignores attn_factor; SGLang does the opposite.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope type {kind!r}; supported: {ROPE_TYPES}")
    if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0 and not is_partial:
        raise Unsupported(f"partial_rotary_factor = {part}")
    if kind == "default":
        size = int(head_size(config) * part)
        return plain_rope(parameters["rope_theta"], size), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return torch.as_tensor(frequencies), float(scale)


def plain_rope(theta: float, size: int) -> torch.Tensor:
    """Return f32[size / 2]: radians per position of rotary embeddings without scaling (arXiv:2104.09864)."""
    return torch.as_tensor(1.0 / theta ** (torch.arange(0, size, 2).float() / size))
