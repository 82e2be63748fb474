"""Check that the sizes in config.json are consistent with each other and with the shapes of the weights. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

_COUNTS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Qwen3-MoE was published with the first name; transformers 5 writes the second."""
_MAY_BE_NONE: Final = (*EXPERTS, "num_experts_per_tok", "num_nextn_predict_layers")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_ATTENTION: Final = "model.layers.0.self_attn"

Shapes = Mapping[str, tuple[int, ...]]


def problem(config: Mapping[str, Any], shapes: Shapes) -> str:
    """Return the first inconsistency; "" if there is none.

    Missing keys are not checked; transformers has defaults for them.

    shapes  shapes of the weights by their Hugging Face names; any of them may be missing
    """
    for name in (*_COUNTS, *_MAY_BE_NONE):
        value, least = config.get(name), int(name in _COUNTS)
        if value is not None and (type(value) is not int or value < least):
            return f"{name} must be a whole number >= {least}, got {value!r}"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        return f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    experts, chosen = next((config[name] for name in EXPERTS if config.get(name)), 0), config.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        return f"num_experts_per_tok {chosen} is more than its {experts} experts"
    return (
        _of_end(config)
        or _of_heads(config, shapes)
        or _of_matrix(config, shapes, "model.embed_tokens.weight", ("vocab_size", "hidden_size"))
        or _of_matrix(config, shapes, "lm_head.weight", ("vocab_size", "hidden_size"))
        or _of_matrix(config, shapes, "model.layers.0.mlp.down_proj.weight", ("hidden_size", "intermediate_size"))
        or _of_layers(config, {int(found[1]) for name in shapes if (found := _LAYER.match(name))})
    )


def _of_end(config: Mapping[str, Any]) -> str:
    """Check eos_token_id: a token that the model cannot sample would never end an answer."""
    ends, size = config.get("eos_token_id"), config.get("vocab_size")
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (type(end) is not int or not 0 <= end < (size or math.inf)):
            return f"eos_token_id {end!r} is none of the {size} tokens of vocab_size"
    return ""


def _of_heads(config: Mapping[str, Any], shapes: Shapes) -> str:
    if config.get("kv_lora_rank") or config.get("linear_num_key_heads"):
        # latent attention: head_dim is the size of the rotated part; Qwen3-Next: q_proj has gates, too
        return ""
    for key, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads, shape = config.get(key), shapes.get(f"{_ATTENTION}.{name}.weight")
        if not heads or not shape:
            continue
        size = config.get("head_dim")
        if shape[0] % heads or (size and shape[0] != heads * size):
            of = f" of head_dim {size}" if size else ""
            return f"{key} {heads}{of} does not divide the {shape[0]} rows of {_ATTENTION}.{name}.weight"
    return ""


def _of_matrix(config: Mapping[str, Any], shapes: Shapes, weight: str, keys: tuple[str, ...]) -> str:
    for key, length in zip(keys, shapes.get(weight, ()), strict=False):
        if config.get(key) and config[key] != length:
            return f"{key} is {config[key]}, and {weight} has the shape {list(shapes[weight])}"
    return ""


def _of_layers(config: Mapping[str, Any], there: Collection[int]) -> str:
    """Check the number of layers. DeepSeek-V3 and GLM-4.5 have extra layers at the end that predict further tokens."""
    num_layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    if not num_layers or not there:
        return ""
    if missing := set(range(num_layers)) - set(there):
        return f"num_hidden_layers is {num_layers}, and the weights have no layer {min(missing)}"
    if max(there) >= num_layers + further:
        return f"num_hidden_layers is {num_layers}, and the weights have {max(there) + 1} layers"
    return ""
