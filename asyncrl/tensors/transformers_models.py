"""What users of transformers' models need: one load at a time, and the names that tensors have in weight files.

Loading changes the library's state for all threads of the process. Two loads at once can leave that state changed for
good; from then on no embedding is tied to its output layer (test_models_loaded_at_once_keep_their_tied_weights).

transformers keeps all experts of a layer in two tensors:
gate_up_proj [experts, 2 F, H]  becomes ``0.gate_proj.weight`` [F, H], ``0.up_proj.weight`` [F, H], ``1.gate_proj...``
down_proj [experts, H, F]       becomes ``0.down_proj.weight`` [H, F], ...
In files, Mixtral has other words for a mixture and for the matrices of an expert. gpt-oss has fused tensors there, too.
Test: test_experts_have_the_names_of_the_folder.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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


_OTHERS: Final[Mapping[str, _Words]] = {"mixtral": _Words(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")}
_FUSED_IN_FILES: Final = ("gpt_oss",)


def by_names_in_files(tensors: Mapping[str, torch.Tensor], *, model_type: str) -> dict[str, torch.Tensor]:
    """Return tensors of a transformers model by their names in weight files; expert tensors are views.

    model_type: as in config.json
    """
    if model_type in _FUSED_IN_FILES:
        return dict(tensors)
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
