"""Low-rank adapters as PEFT names them, and the adapter_config.json that goes with their tensors.

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
_MODULE: Final = re.compile(r"\.(\w*_proj\w*)(\.lora_[AB])?\.weight$")
"""Matrices of layers; embeddings, the output layer and routers have no adapters."""


def module_of(name: str) -> str:
    """``q_proj`` of model.layers.0.self_attn.q_proj.weight, or of its adapter; empty for what has none."""
    found = _MODULE.search(name)
    return found.group(1) if found else ""


def names(base: str) -> tuple[str, str]:
    """Of the two tensors beside ``base``, a matrix [out, in]: A [rank, in] and B [out, rank]."""
    module = _PREFIX + base.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def are_adapters(entries: Iterable[TensorEntry]) -> bool:
    return any(entry.name.endswith((".lora_A.weight", ".lora_B.weight")) for entry in entries)


def config(entries: Iterable[TensorEntry], *, base: Path) -> dict[str, Any] | None:
    """adapter_config.json of these tensors, whose scale is in B; None if they are no adapters."""
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
        "target_modules": sorted({module_of(entry.name) for entry in downs}),
        "inference_mode": True,
    }
