"""Reads a Hugging Face folder without transformers' model code: shape, rotary frequencies, weights.

The weight map works both ways: ``fuse`` makes the shards of one Megatron tensor out of Hugging Face tensors, ``unfuse``
splits them again. Tensor parallelism is just a number here, so tests need no process group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.backends.models import Head
from asyncrl.errors import ConfigError

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")

Cut = Literal["whole", "vocabulary", "rows", "qkv", "gate_up"]
"""How Megatron splits a tensor over tensor-parallel ranks.

whole       replicated
vocabulary  by rows, with the vocabulary padded to a multiple of the ranks
rows        by columns (Megatron's row-parallel)
qkv         by key-value groups, each being its queries, its key, its value
gate_up     gate and up by rows; a shard is its gate rows, then its up rows
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """config.json of a dense decoder with grouped-query attention, rotary positions and SwiGLU."""

    num_layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    dtype: torch.dtype
    rope_frequencies: torch.Tensor
    """f32[head_size / 2]: radians per position."""


def read_shape(folder: Path, *, where: str = "model.path") -> ModelShape:
    """Shape of the model in ``folder``; ``where`` is the run file's key for it.

    Raises ConfigError if the architecture is not in ARCHITECTURES or has features we do not map.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many types for a bad config.json
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{where}: {folder} is not a Hugging Face model folder: {type(error).__name__}: {' '.join(reason[:2])}"
        ) from error
    architecture = (config.architectures or [f"unnamed architecture of type {config.model_type}"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: {folder} holds a {architecture}; the megatron backend supports {', '.join(ARCHITECTURES)}"
        )
    _refuse_extras(f"{where}: {folder}", architecture, config)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        feed_forward_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_size=_head_size(config),
        vocabulary_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        is_tied=config.tie_word_embeddings,
        has_qkv_bias=architecture == "Qwen2ForCausalLM",
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=config.dtype or torch.float32,
        rope_frequencies=_rope_frequencies(f"{where}: {folder}", config),
    )


def _refuse_extras(where: str, architecture: str, config: Any) -> None:
    """Raise ConfigError for a feature that would be silently ignored."""
    extras = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "attention_dropout": config.attention_dropout,
    }
    for name, is_used in extras.items():
        if is_used:
            raise ConfigError(f"{where}: the megatron backend does not support {architecture} with {name}")


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope_frequencies(where: str, config: Any) -> torch.Tensor:
    """Computed by transformers, so that scaling matches the engine's."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: rope type {kind!r} is not supported; supported: {ROPE_TYPES}")
    if kind == "default":
        size = _head_size(config)
        return torch.as_tensor(1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if factor != 1.0:
        raise ConfigError(f"{where}: rope type {kind!r} scales attention by {factor}; not supported")
    return torch.as_tensor(frequencies)


# -- weights -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_weights(folder: Path, *, where: str = "model.path") -> Iterator[Callable[[str], torch.Tensor]]:
    """Reader of single tensors from model.safetensors, or from the files in its index. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    try:
        with ExitStack() as stack:
            if index.exists():
                files_of = json.loads(index.read_text())["weight_map"]
            else:
                with safe_open(folder / "model.safetensors", framework="pt") as file:
                    files_of = dict.fromkeys(file.keys(), "model.safetensors")
            files = {
                name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in set(files_of.values())
            }

            def read(name: str) -> torch.Tensor:
                if name not in files_of:
                    raise ConfigError(f"{where}: {folder} has no weight {name}")
                tensor: torch.Tensor = files[files_of[name]].get_tensor(name)
                return tensor

            yield read
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{where}: {folder}: cannot read its safetensors: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """One Megatron parameter, how it is split, and the Hugging Face tensors it is made of."""

    megatron: str
    cut: Cut
    huggingface: tuple[str, ...]


def weight_map(shape: ModelShape, *, head: Head = "logprobs") -> list[Mapping]:
    """Every parameter of the model except a value head, which no folder has."""
    maps = [Mapping(megatron="embedding.word_embeddings.weight", cut="vocabulary", huggingface=(_EMBEDDING,))]
    for layer in range(shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention = f"{theirs}.self_attn"
        table: list[tuple[str, Cut, tuple[str, ...]]] = [
            ("self_attention.linear_qkv.layer_norm_weight", "whole", (f"{theirs}.input_layernorm.weight",)),
            ("self_attention.linear_qkv.weight", "qkv", tuple(f"{attention}.{x}_proj.weight" for x in "qkv")),
            ("self_attention.linear_proj.weight", "rows", (f"{attention}.o_proj.weight",)),
            ("mlp.linear_fc1.layer_norm_weight", "whole", (f"{theirs}.post_attention_layernorm.weight",)),
            ("mlp.linear_fc1.weight", "gate_up", tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))),
            ("mlp.linear_fc2.weight", "rows", (f"{theirs}.mlp.down_proj.weight",)),
        ]
        if shape.has_qkv_bias:
            names = tuple(f"{attention}.{x}_proj.bias" for x in "qkv")
            table.append(("self_attention.linear_qkv.bias", "qkv", names))
        if shape.has_qk_norm:
            table.append(("self_attention.q_layernorm.weight", "whole", (f"{attention}.q_norm.weight",)))
            table.append(("self_attention.k_layernorm.weight", "whole", (f"{attention}.k_norm.weight",)))
        maps += [Mapping(megatron=f"{ours}.{name}", cut=cut, huggingface=names) for name, cut, names in table]
    maps.append(Mapping(megatron="decoder.final_layernorm.weight", cut="whole", huggingface=("model.norm.weight",)))
    if not shape.is_tied and head == "logprobs":
        maps.append(Mapping(megatron="output_layer.weight", cut="vocabulary", huggingface=("lm_head.weight",)))
    return maps


_EMBEDDING = "model.embed_tokens.weight"


def require_divisible(shape: ModelShape, tensor_parallel: int, *, where: str = "model.path") -> None:
    """Raises ConfigError if the model cannot be split over ``tensor_parallel`` ranks."""
    whose = "the model" if where == "model.path" else f"the {where.removesuffix('.path')}"
    for what, number in (
        ("num_key_value_heads", shape.num_key_value_heads),
        ("intermediate_size", shape.feed_forward_size),
    ):
        if number % tensor_parallel:
            raise ConfigError(f"learner.tensor_parallel: {tensor_parallel} does not divide {whose}'s {what}, {number}")


def padded_vocabulary(shape: ModelShape, tensor_parallel: int) -> int:
    """Vocabulary size padded to a multiple of the ranks; padding rows never enter a logprob."""
    return -(-shape.vocabulary_size // tensor_parallel) * tensor_parallel


def fuse(parts: Sequence[torch.Tensor], cut: Cut, shape: ModelShape, *, tensor_parallel: int) -> list[torch.Tensor]:
    """Hugging Face tensors to one Megatron shard per tensor-parallel rank."""
    if cut == "whole":
        return [parts[0]] * tensor_parallel
    if cut == "vocabulary":
        padding = padded_vocabulary(shape, tensor_parallel) - parts[0].shape[0]
        padded = torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].shape[1])]) if padding else parts[0]
        return list(padded.chunk(tensor_parallel))
    if cut == "rows":
        return list(parts[0].chunk(tensor_parallel, dim=1))
    if cut == "gate_up":
        pairs = zip(*(part.chunk(tensor_parallel) for part in parts), strict=True)
        return [torch.cat(pair) for pair in pairs]
    groups = shape.num_key_value_heads
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(tensor_parallel))


def unfuse(shards: Sequence[torch.Tensor], cut: Cut, shape: ModelShape) -> list[torch.Tensor]:
    """The inverse of ``fuse``: all shards of one Megatron tensor to its Hugging Face tensors, as views if possible."""
    if cut == "whole":
        return [shards[0]]
    if cut == "vocabulary":
        return [_joined(shards)[: shape.vocabulary_size]]
    if cut == "rows":
        return [_joined(shards, dim=1)]
    if cut == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[part] for half in halves]) for part in (0, 1)]
    whole = _joined(shards)
    queries = shape.num_heads // shape.num_key_value_heads * shape.head_size
    grouped = whole.reshape(shape.num_key_value_heads, -1, *whole.shape[1:])
    parts = torch.split(grouped, [queries, shape.head_size, shape.head_size], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _joined(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
