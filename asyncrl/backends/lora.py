"""Low-rank adapters (arXiv:2106.09685) of the policy: which parameters have them, their names and initial values.

A matrix W becomes W + alpha / rank x up x down; W itself stays unchanged. A parameter made of several Hugging Face
matrices has one pair for each matrix, so exported adapters have PEFT's names.
Test: tests/unit/backends/megatron/test_lora.py.
"""

from __future__ import annotations

import difflib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from asyncrl.backends import huggingface, weight_cuts
from asyncrl.backends.families.layer_weights import Cut
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.frozen import is_trained
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.weight_map import Mapping, weight_map
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.tensors import adapter_names, weight_files
from asyncrl.tensors.adapter_names import module_name

ALL: Final = "all-linear"
_SERVED: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules whose adapters were tested with engines, outside experts and linear attention."""
_SERVED_OF_EXPERTS: Final = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Modules of experts whose adapters SGLang 0.5.23 reads (srt/lora/mem_pool.py), on GPUs alone: never run here."""
EXPERT_ALIGNMENT: Final = {"bfloat16": 8, "float32": 4}
"""Numbers in 16 bytes, by dtype. Kernels for experts process whole groups of this size."""


def with_adapters(maps: Iterable[Mapping], lora: Lora) -> Iterator[Mapping]:
    """Yield ``maps``, each adapted one followed by the maps of its adapter."""
    for entry in maps:
        yield entry
        if _is_adapted(entry, lora.modules):
            yield from adapters_of(entry)


def adapters_of(entry: Mapping) -> tuple[Mapping, Mapping]:
    """Return down [tensors, rank, in] and up [out, rank] for a parameter [out, in]; for experts both [experts, ...]."""
    down: Cut = "stacked"
    up: Cut = entry.cut
    if entry.cut == "rows":
        down, up = "stacked_rows", "whole"
    elif entry.is_of_experts:
        down = "expert_stacked"
    pairs = [adapter_names.names(name) for name in entry.huggingface]
    return (
        Mapping(
            megatron=f"{entry.megatron}_adapter.down",
            cut=down,
            huggingface=tuple(pair[0] for pair in pairs),
        ),
        Mapping(
            megatron=f"{entry.megatron}_adapter.up",
            cut=up,
            huggingface=tuple(pair[1] for pair in pairs),
        ),
    )


def initial(entry: Mapping, *, rank: int, inputs: int) -> list[torch.Tensor]:
    """Return the initial values of the tensors of ``down``, f32[rank, inputs] each.

    They are uniform as in PEFT, and the same in every layout of ranks. ``up`` starts as zeros, so training starts from
    the model in the folder.
    """
    bound = inputs**-0.5
    return [
        torch.empty(rank, inputs).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
        )
        for name in entry.huggingface
    ]


def fingerprint(model: AuxiliaryModel) -> str:
    """Return the fingerprint of the weights below a model's adapters; "" if it has none. Raises WeightsError."""
    has_adapters = model.optimizer is not None and model.optimizer.lora is not None
    return weight_files.fingerprint(model.path) if has_adapters else ""


def require_base(saved: Path, model: AuxiliaryModel, *, base: str) -> None:
    """Raise ConfigError if the adapters in the checkpoint ``saved`` were trained on other weights than ``model``'s.

    base  fingerprint of the weights on which they were trained; "" if the checkpoint has no adapters
    """
    if base and base != fingerprint(model):
        raise ConfigError(
            f"model.path: {model.path} has other weights than the model whose adapters are in {saved}; resume with "
            "that model, or start another run.name"
        )


def matrix_of_rows(entry: Mapping, shape: ModelShape, *, rows: int) -> torch.Tensor:
    """Return i64[rows]: for each of a rank's rows of a parameter or expert, the Hugging Face matrix it belongs to."""
    if entry.cut in ("qkv", "gated_qkv", "delta_heads", "delta_parts"):
        _, sizes = weight_cuts.groups_of(entry.cut, shape)
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).repeat(rows // sum(sizes))
    if entry.cut in ("gate_up", "expert_gate_up"):
        return torch.arange(2).repeat_interleave(rows // 2)
    return torch.zeros(rows, dtype=torch.int64)


def check(run: RunConfig) -> None:
    """Refuse modules that the model lacks, and modules that are only part of a fused parameter. Raises ConfigError."""
    settings = run.learner.lora
    if not settings.rank:
        return
    if run.learner.freeze or run.learner.train_only:
        raise ConfigError("learner.lora: only adapters are trained; remove learner.freeze and train_only, name modules")
    if run.learner.train_vision:
        raise ConfigError("learner.lora: only adapters of the decoder are trained; remove learner.train_vision")
    shape = huggingface.policy_shape(run)
    if settings.rank > shape.hidden_size:
        raise ConfigError(
            f"learner.lora.rank: {settings.rank} is more than the model's hidden_size, {shape.hidden_size}, and no "
            "matrix of its layers needs more; use a smaller rank"
        )
    maps = [entry for entry in weight_map(shape) if not entry.is_of_vision]
    if run.learner.expert_tensor_parallel > 1 and any(
        entry.is_of_experts and _is_adapted(entry, settings.modules) for entry in maps
    ):
        raise ConfigError(
            "learner.lora.modules: adapters of experts are not shared by the ranks of learner.expert_tensor_parallel; "
            "distribute whole experts with expert_parallel, or name only modules of attention"
        )
    known = sorted({module for entry in maps for name in entry.huggingface if (module := module_name(name))})
    for module in settings.modules:
        if module not in (ALL, *known):
            near = difflib.get_close_matches(module, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"learner.lora.modules: the model has no {module!r}; {hint}")
    for entry in maps:
        names = {module_name(name) for name in entry.huggingface}
        chosen = names.intersection(settings.modules)
        if ALL not in settings.modules and chosen and chosen != names:
            raise ConfigError(
                f"learner.lora.modules: {', '.join(sorted(names))} are one parameter in the megatron backend; name all "
                "of them or none"
            )
        if settings.publish == "adapter" and _is_adapted(entry, settings.modules) and not _is_served(entry):
            refused = {module_name(name) for one in maps if not _is_served(one) for name in one.huggingface}
            of_attention = [module for module in _SERVED[:4] if module in known and module not in refused]
            others = f"name other learner.lora.modules, such as {json.dumps(of_attention)}, or " if of_attention else ""
            raise ConfigError(
                f'learner.lora.publish: "adapter": engines take no adapters of {_described(entry)}; {others}use '
                'publish = "merged"'
            )
        alignment = EXPERT_ALIGNMENT[run.model.dtype]
        if entry.is_of_experts and settings.rank % alignment and _is_adapted(entry, settings.modules):
            raise ConfigError(
                f"learner.lora.rank: kernels for experts need a multiple of {alignment}, got {settings.rank}"
            )


def _is_served(entry: Mapping) -> bool:
    """Return whether engines take adapters of this parameter."""
    is_gated = entry.cut == "gated_qkv"  # Qwen3-Next's q_proj has a gate beside each head
    served = _SERVED_OF_EXPERTS if entry.is_of_experts else _SERVED
    return not is_gated and all(module_name(name) in served for name in entry.huggingface)


def _described(entry: Mapping) -> str:
    names = ", ".join(sorted({module_name(name) for name in entry.huggingface}))
    return f"{names}{' of experts' if entry.is_of_experts else ''}"


def _is_adapted(entry: Mapping, modules: Sequence[str]) -> bool:
    """Return whether the parameter gets an adapter; none of the vision tower does."""
    if entry.is_of_vision or not is_trained(entry.huggingface[0], freeze=(), train_only=()):
        return False
    names = [module_name(name) for name in entry.huggingface]
    return all(names) and (ALL in modules or any(name in modules for name in names))
