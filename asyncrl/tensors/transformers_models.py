"""What users of transformers' models need: one load at a time, and the names that tensors have in weight files.

Loading changes the library's state for all threads of the process. Two loads at once can leave that state changed for
good; from then on no embedding is tied to its output layer (test_models_loaded_at_once_keep_their_tied_weights).

transformers keeps all experts of a layer in two tensors:
gate_up_proj [experts, 2 F, H]  becomes ``0.gate_proj.weight`` [F, H], ``0.up_proj.weight`` [F, H], ``1.gate_proj...``
down_proj [experts, H, F]       becomes ``0.down_proj.weight`` [H, F], ...
In files, Mixtral and MiniMax-M2 have other words for a mixture and for the matrices of an expert. gpt-oss and
Qwen3.5 with its tower have fused tensors there, too, and so has Qwen3-VL, turned.
Test: test_experts_have_the_names_of_the_folder.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

LOADING: Final = threading.Lock()
"""Held while from_pretrained of transformers runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Words in a family's weight files: for the mixture, and for gate, up and down of an expert."""

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_OF_MIXTRAL: Final = _Words(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")
_OTHERS: Final[Mapping[str, _Words]] = {"mixtral": _OF_MIXTRAL, "minimax_m2": _OF_MIXTRAL}
_FUSED_IN_FILES: Final = ("gpt_oss", "qwen3_5_moe")
_TURNED_IN_FILES: Final = ("qwen3_vl_moe",)
"""Files have the matrix of an expert the other way round: [inputs, outputs]."""
_PREFIXES: Final[Mapping[str, Mapping[str, str]]] = {
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."}
}
"""What names begin with in transformers, and in files."""


def by_names_in_files(tensors: Mapping[str, torch.Tensor], *, model_type: str) -> dict[str, torch.Tensor]:
    """Return tensors of a transformers model by their names in weight files; expert tensors are views.

    model_type: as in config.json
    """
    tensors = {_renamed(name, _PREFIXES.get(model_type, {})): tensor for name, tensor in tensors.items()}
    if model_type in _TURNED_IN_FILES:
        return {name: one.transpose(1, 2) if ".experts." in name else one for name, one in tensors.items()}
    if model_type in _FUSED_IN_FILES:
        return tensors
    words = _OTHERS.get(model_type, _Words())
    fused = {"gate_up_proj": (words.gate, words.up), "down_proj": (words.down,)}
    found = {}
    for name, tensor in tensors.items():
        in_file = name.replace(".mlp.", f".{words.mixture}.")
        prefix, _, last = in_file.rpartition(".")
        if prefix.endswith(".experts") and last in fused:
            parts = fused[last]
            for expert, whole in enumerate(tensor):
                named = zip(parts, whole.chunk(len(parts)), strict=True)
                found.update({f"{prefix}.{expert}.{part}.weight": view for part, view in named})
        else:
            found[in_file] = tensor
    return found


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    return next((theirs + name.removeprefix(ours) for ours, theirs in prefixes.items() if name.startswith(ours)), name)


def has_vision(config: Any) -> bool:
    """Return whether a model of this config has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_model(folder: Path, **options: Any) -> Any:
    """Return the model in ``folder`` with its output layer: of text, or of text and images.

    options   of from_pretrained.  Raises what transformers raises: OSError, ValueError, KeyError
    """
    import transformers  # takes seconds

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    with LOADING:
        return kind.from_pretrained(folder, **options)
