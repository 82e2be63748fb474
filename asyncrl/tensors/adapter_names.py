"""PEFT's names for low-rank adapters, and the adapter_config.json that describes their tensors.

https://huggingface.co/docs/peft, "PEFT checkpoint format".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from asyncrl.tensors.snapshot import TensorEntry

CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_MODULE: Final = re.compile(r"\.(\w*_proj\w*|w[123])(\.lora_[AB])?\.weight$")
"""Matrices of layers; Mixtral's experts have w1 to w3. Embeddings, the output layer and routers have no adapters."""

CUT_BY_INPUTS: Final = ("o_proj", "down_proj", "out_proj", "w2")
"""Modules whose inputs tensor-parallel ranks divide; of others, they divide the outputs."""


def module_name(name: str) -> str:
    """Return ``q_proj`` for model.layers.0.self_attn.q_proj.weight or its adapters; "" for tensors without adapters."""
    found = _MODULE.search(name)
    return found.group(1) if found else ""


def names(base: str) -> tuple[str, str]:
    """Return the names of the adapter matrices A [rank, in] and B [out, rank] of ``base``, a matrix [out, in]."""
    module = _PREFIX + base.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def are_adapters(entries: Iterable[TensorEntry]) -> bool:
    return any(entry.name.endswith((".lora_A.weight", ".lora_B.weight")) for entry in entries)


def config(entries: Iterable[TensorEntry], *, base: Path) -> dict[str, Any] | None:
    """Return adapter_config.json for these tensors, or None if they are not adapters. B already includes the scale."""
    downs = [entry for entry in entries if entry.name.endswith(".lora_A.weight")]
    if not downs:
        return None
    rank = downs[0].shape[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module_name(entry.name) for entry in downs}),
        "inference_mode": True,
    }
