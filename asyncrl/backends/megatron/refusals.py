"""Models and rank layouts that the Megatron backend refuses before it starts. Cheap to import."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.backends import huggingface, weight_cuts
from asyncrl.backends.families.family import Family
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.lora import EXPERT_ALIGNMENT
from asyncrl.backends.weight_map import weight_map
from asyncrl.config.adapter import Layout, RunConfig
from asyncrl.config.learner import LearnerSection
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.tensors import fp8, int4
from asyncrl.tensors.model_tensors import Shapes, read_shapes, trained_shapes, without_draft_layers

_UNEVEN: Final = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Megatron's fields for stages of different lengths. Megatron checks their values."""


def check(
    run: RunConfig, *, balances_experts: bool, recomputes_all: bool = False, rounds_experts: bool = False
) -> None:
    """Raise ConfigError for models that the run's learner cannot train, or its engines cannot load."""
    own = huggingface.load_family(run.model.family)
    for key, folder in folders(run).items():
        fields = {**run.learner.megatron, **run.own_megatron.get(key, {})}
        shape = require_trainable(folder, where=key, layout=run.learner.layout, transformer=fields, own=own)
        require_aligned_experts(shape, run.model.dtype, where=key, ranks=run.learner.layout.expert_tensor)
        if key == "model.path":
            require_tensors_of_engines(folder, shape)
            if balances_experts and not shape.experts:
                raise ConfigError(
                    "learner.options.aux_loss_coefficient: balances the use of experts, and the model has none; remove "
                    "it"
                )
            if shape.vision:
                _require_tower(run, shape, recomputes_all=recomputes_all)
            if run.weights.quantization:
                require_quantizable(shape, run.weights.quantization, ranks=run.learner.layout.expert_tensor)
            if rounds_experts and run.learner.lora.rank:
                raise ConfigError(
                    f'weights.quantization: "{run.weights.quantization}" rounds sums of weights and adapters, and the '
                    "learner would round weights alone; remove learner.lora, or set learner.options.fake_quantization "
                    '= "off"'
                )


def is_trainable(run: RunConfig, learner: LearnerSection) -> bool:
    """Return whether the run's models can be trained in the layout of another [learner]."""
    own = huggingface.load_family(run.model.family)
    try:
        for key, folder in folders(run).items():
            fields = {**learner.megatron, **run.own_megatron.get(key, {})}
            shape = require_trainable(folder, where=key, layout=learner.layout, transformer=fields, own=own)
            require_aligned_experts(shape, run.model.dtype, where=key, ranks=learner.layout.expert_tensor)
    except ConfigError:
        return False
    return True


def folders(run: RunConfig) -> dict[str, Path]:
    """Return the folder of every model that differs from the policy in weights or fields, by its key of the run
    file."""
    return run.model_paths | {key: run.model_paths.get(key, Path(run.model.path)) for key in run.own_megatron}


def _require_tower(run: RunConfig, shape: ModelShape, *, recomputes_all: bool) -> None:
    """Raise ConfigError for what a model with a vision tower cannot do."""
    if run.learner.lora.publish == "adapter":
        raise ConfigError(
            'learner.lora.publish: "adapter" was not tried with engines whose model has a vision tower; use "merged"'
        )
    if run.learner.train_vision and recomputes_all and shape.vision and shape.vision.num_layer_features:
        raise ConfigError(
            'learner.options.recompute: "full" would run the backward pass of the vision tower once for each layer '
            'that gets features of it; use "selective", or remove learner.train_vision'
        )


def require_routers(run: RunConfig) -> None:
    """Raise ConfigError for a model without experts, whose routing cannot be replayed."""
    shape = huggingface.policy_shape(run)
    if not shape.experts:
        raise ConfigError("learner.options.replay_own_routing: the model has no experts; remove it")


def require_draft_layers(run: RunConfig) -> None:
    """Raise ConfigError unless the run's multi-token-prediction layers can be trained."""
    key, layout = "learner.options.draft_coefficient", run.learner.layout
    shape = huggingface.policy_shape(run)
    if not shape.num_draft_layers or shape.family is None or shape.family.draft_layer is None:
        raise ConfigError(f"{key}: the model has no multi-token-prediction layers that asyncrl trains; remove it")
    for name, ranks in (("pipeline_parallel", layout.pipeline), ("context_parallel", layout.context)):
        if ranks > 1:
            raise ConfigError(
                f"{key}: a draft layer needs the embedding and whole sequences where the last layer is, and "
                f"learner.{name} = {ranks} has them elsewhere; use tensor_parallel, expert_parallel or more copies"
            )
    if run.learner.lora.rank:
        raise ConfigError(f"{key}: with learner.lora only adapters are trained; remove one of them")


def why_no_shared_prefixes(run: RunConfig, *, trains_drafts: bool) -> str:
    """Return which model of the run needs every sequence whole; empty if none does."""
    if trains_drafts:
        return "model.path has draft layers (learner.options.draft_coefficient), each of which sees the next token"
    own = huggingface.load_family(run.model.family)
    for key, folder in run.model_paths.items():
        if reason := huggingface.read_shape(folder, where=key, own=own).why_no_shared_prefixes:
            return f"{key} has {reason}"
    return ""


def require_trainable(
    folder: Path, *, where: str, layout: Layout, transformer: Mapping[str, Any], own: Family | None = None
) -> ModelShape:
    """Return the model's shape. Raises ConfigError if the backend cannot train the model in that layout.

    where: the run file's key for the folder.  transformer: extra fields of Megatron's TransformerConfig.  own: the
    family of model.family
    """
    shape = huggingface.read_shape(folder, where=where, own=own)
    if shape.is_tied:
        huggingface.require_tied(folder, embedding=f"{shape.prefix}embed_tokens.weight", where=where)
    weight_cuts.require_divisible(shape, layout.tensor, where=where)
    whose = "the model" if where == "model.path" else f"the {where.removesuffix('.path')}"
    parts = layout.pipeline * layout.virtual_pipeline
    if shape.num_layers % parts and not any(transformer.get(field) for field in _UNEVEN):
        keys = "pipeline_parallel" + (" x virtual_pipeline" if layout.virtual_pipeline > 1 else "")
        mend = f"for stages of different lengths set {_section(where)}.megatron = {{ {_UNEVEN[1]} = n }}"
        raise ConfigError(
            f"learner.{keys}: {parts} does not divide {whose}'s num_hidden_layers, {shape.num_layers}; "
            f"{mend if parts < shape.num_layers else 'use fewer stages'}"
        )
    if shape.linear and (heads := shape.linear.num_key_heads // layout.tensor) % layout.context:
        raise ConfigError(
            f"learner.context_parallel: {layout.context} ranks share the heads of linear attention, and do not divide "
            f"{whose}'s linear_num_key_heads / tensor_parallel, {heads}; use fewer ranks"
        )
    if not any(transformer.get(field) for field in _UNEVEN):
        for first in range(0, shape.num_layers, shape.num_layers // parts):
            require_choice(shape, first)
    _require_experts(shape, layout, whose)
    if shape.vision:
        _require_first_layers(shape, layout, transformer, whose)
    return shape


def _section(where: str) -> str:
    """Return the section with the fields of a model alone.  where: the run file's key for its folder"""
    return "learner" if where == "model.path" else where.removesuffix(".path")


def require_choice(shape: ModelShape, first: int) -> None:
    """Raise ConfigError if layer ``first`` of a stage, from 0, uses the keys that a layer of another stage chooses."""
    indexer = shape.latent.indexer if shape.latent else None
    if indexer and (source := indexer.source(first)) < first:
        raise ConfigError(
            f"learner.pipeline_parallel: a stage begins with layer {first}, which uses the keys that layer {source} "
            f"chooses, on another stage; use other stages (learner.megatron = {{ {_UNEVEN[0]} = n }} moves them)"
        )


def _require_first_layers(shape: ModelShape, layout: Layout, transformer: Mapping[str, Any], whose: str) -> None:
    """Raise ConfigError if a layer that adds features of the vision tower is not behind it, on the same stage."""
    first, last, beside_embedding, _ = (transformer.get(field) or 0 for field in _UNEVEN)
    on_first = shape.num_layers // layout.pipeline
    if first:
        on_first = first
    elif last:
        on_first = (shape.num_layers - last) // max(1, layout.pipeline - 1)
    elif beside_embedding:
        on_first -= 1
    on_first //= layout.virtual_pipeline
    assert shape.vision is not None
    if on_first < shape.vision.num_layer_features:
        raise ConfigError(
            f"learner.pipeline_parallel: {whose}'s first {shape.vision.num_layer_features} layers get features of the "
            f"vision tower, and its stage would hold {on_first}; use fewer stages, or set learner.megatron = "
            f"{{ {_UNEVEN[0]} = n }}"
        )


def require_aligned_experts(shape: ModelShape, dtype: str, *, where: str, ranks: int = 1) -> None:
    """Raise ConfigError for experts whose sizes torch's grouped product does not take in the learner's dtype.

    ranks: that share an expert
    """
    if shape.experts is None:
        return
    alignment = EXPERT_ALIGNMENT[dtype]
    sizes = {
        "hidden_size": shape.hidden_size,
        "an expert's intermediate size": shape.experts.feed_forward_size // ranks,
    }
    for name, size in sizes.items():
        if size % alignment:
            raise ConfigError(
                f"{where}: {name} is {size}, and kernels for experts need a multiple of {alignment} in {dtype}; use "
                'learner.backend = "reference"'
            )


def require_quantizable(shape: ModelShape, quantization: str, *, ranks: int = 1) -> None:
    """Raise ConfigError for models that read images or have an indexer, whose experts are one tensor, or whose sizes
    the format's block does not divide.

    ranks: that share an expert, each of which rounds its own part
    """
    if shape.vision:
        raise ConfigError(f'weights.quantization: "{quantization}" was not tried with a vision tower; remove it')
    if shape.latent and shape.latent.indexer:
        raise ConfigError(
            f'weights.quantization: "{quantization}" was not tried with an indexer, of which engines quantize other '
            "matrices; remove it"
        )
    if any(entry.is_fused for entry in weight_map(shape)):
        raise ConfigError(
            f'weights.quantization: "{quantization}" is for matrices, and the experts of a layer are one tensor in '
            "this model; remove it"
        )
    if quantization in int4.GROUPS:
        _require_groups(shape, quantization, ranks)
        return
    block, experts, latent = fp8.BLOCK, shape.experts, shape.latent
    sizes = {"hidden_size": shape.hidden_size}
    if experts is None or experts.dense_layers:
        sizes["intermediate_size"] = shape.feed_forward_size
    if experts is not None:
        sizes |= {"moe_intermediate_size": experts.feed_forward_size, "that of shared experts": experts.shared_size}
    if latent is None:
        sizes["num_key_value_heads x head_dim"] = shape.num_key_value_heads * shape.head_size
    else:
        heads = shape.num_heads
        sizes |= {"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.key_value_rank}
        sizes |= {"num_attention_heads x v_head_dim": heads * latent.value_size}
    for name, size in sizes.items():
        if size % block:
            raise ConfigError(
                f'weights.quantization: "{quantization}" has blocks of {block} numbers, and {name} is {size}; remove it'
            )


def _require_groups(shape: ModelShape, quantization: str, ranks: int) -> None:
    """Raise ConfigError unless the model has experts whose rows can be divided into groups with a scale each."""
    if shape.experts is None:
        raise ConfigError(
            f'weights.quantization: "{quantization}" is for routed experts, and the model has none: SGLang loads other '
            'matrices in 4 bits only when it starts; use "fp8"'
        )
    group, size = int4.GROUPS[quantization], shape.experts.feed_forward_size
    for name, numbers, parts in (("hidden_size", shape.hidden_size, 1), ("moe_intermediate_size", size, ranks)):
        if numbers % (parts * group):
            shared = f", shared by expert_tensor_parallel = {parts} ranks" if parts > 1 else ""
            mend = 'use "int4_group32"' if group > 32 and numbers % (parts * 32) == 0 else "remove it"
            raise ConfigError(
                f'weights.quantization: "{quantization}" has groups of {group} numbers, and {name} is {numbers}'
                f"{shared}; {mend}"
            )


def require_tensors_of_engines(folder: Path, shape: ModelShape) -> None:
    """Raise ConfigError unless the learner exports exactly the tensors in the model's folder, which engines load."""
    where = f"model.path: {folder}"
    try:
        there = trained_shapes(read_shapes(folder), json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, WeightsError) as error:
        raise ConfigError(f"{where}: {error}") from None
    named: Shapes = {name: () for entry in weight_map(shape) for name in entry.huggingface}
    named = without_draft_layers(named, there)
    optional = {"lm_head.weight"} if shape.is_tied else set()
    missing, more = named.keys() - there.keys() - optional, there.keys() - named.keys() - optional
    if missing:
        raise ConfigError(
            f"{where}: its weights lack {_first(missing)}, which its config.json needs; take both from the same model, "
            "or copy it again"
        )
    if more:
        raise ConfigError(
            f"{where}: its weights have {_first(more)}, which the learner does not train and engines expect "
            "with every version; remove what the model does not use from its files, or describe it in a file of yours "
            "with model.family"
        )


def _first(names: Collection[str]) -> str:
    """Return up to three of the names."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(sorted(names)[:3])}{rest}"


def _require_shareable(shape: ModelShape, ranks: int, whose: str) -> None:
    """Raise ConfigError if ``ranks`` cannot share every expert."""
    assert shape.experts is not None
    key, size = "learner.expert_tensor_parallel", shape.experts.feed_forward_size
    if any(entry.is_fused for entry in weight_map(shape)):
        raise ConfigError(
            f"{key}: {whose}'s files have all experts of a layer in one tensor, which is not split within experts; "
            "remove it, and distribute whole experts with expert_parallel"
        )
    if size % ranks:
        raise ConfigError(f"{key}: {ranks} does not divide {whose}'s size of an expert, {size}")


def _require_experts(shape: ModelShape, layout: Layout, whose: str) -> None:
    number = shape.experts.num_experts if shape.experts else 0
    if number == 0:
        for key, ranks in (("expert_parallel", layout.expert), ("expert_tensor_parallel", layout.expert_tensor)):
            if ranks > 1:
                raise ConfigError(f"learner.{key}: {whose} has no experts to share among {ranks} ranks; remove the key")
        return
    if number % layout.expert:
        raise ConfigError(f"learner.expert_parallel: {layout.expert} does not divide {whose}'s experts, {number}")
    if layout.expert_tensor > 1:
        _require_shareable(shape, layout.expert_tensor, whose)
    if layout.tensor > 1 and not layout.is_sequence_parallel:
        raise ConfigError(
            'learner.sequence_parallel: a mixture of experts needs "on" or "auto" with tensor_parallel = '
            f"{layout.tensor}; Megatron does not train it otherwise"
        )
