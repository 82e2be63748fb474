"""Split the fused expert tensors of transformers into one tensor per expert, as weight files and engines name them.

transformers keeps all experts of a layer in two tensors:
gate_up_proj [experts, 2 F, H]  becomes ``0.gate_proj.weight`` [F, H], ``0.up_proj.weight`` [F, H], ``1.gate_proj...``
down_proj [experts, H, F]       becomes ``0.down_proj.weight`` [H, F], ...
Experts with biases (gpt-oss) stay fused, because they are fused in weight files.
Test: test_experts_have_the_names_of_the_folder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def by_names_in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a transformers model by their names in weight files; expert tensors are views."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if prefix.endswith("mlp.experts") and last in _FUSED and f"{prefix}.{last}_bias" not in tensors:
            parts = _FUSED[last]
            for expert, whole in enumerate(tensor):
                named = zip(parts, whole.chunk(len(parts)), strict=True)
                found.update({f"{prefix}.{expert}.{part}.weight": view for part, view in named})
        else:
            found[name] = tensor
    return found
