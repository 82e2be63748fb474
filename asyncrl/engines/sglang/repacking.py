"""Loads INT4 weights a second time into layers of an SGLang server, in the server's process.

When it starts, SGLang repacks such weights into the layout of its Marlin kernels: it replaces the parameters that a
folder can be loaded into by plain ones of other shapes. It has no way back for dense layers (0.5.16 to 0.5.23,
compressed_tensors_wNa16.py), so a second load fails. Here a layer gets new parameters in the folder's layout, SGLang
loads into them, and SGLang repacks them as it did when it started.

Invariants (tests/unit/engines/sglang/test_repacking.py, tests/integration/sglang/test_repacking.py):
  R1 after an update every parameter has the bytes that it would have after a start from the same weights.
  R2 it is also the same object at the same address: CUDA graphs read the addresses that they were captured with.
  R3 an update needs no memory besides the repacked weights of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

FORMATS: Final = frozenset({"int4"})
"""Values of weights.quantization that SGLang repacks when it starts. Only our loader loads them again."""
_KEPT: Final = "asyncrl_kept"
"""Attribute of an unpacked layer: its parameters as the server's kernels read them, and the kernels' workspace."""


@torch.inference_mode(mode=False)
@torch.no_grad()
def unpack(model: torch.nn.Module) -> None:
    """Give every repacked layer parameters that a folder can be loaded into. They use the memory of the old ones."""
    for layer in _repacked(model):
        if hasattr(layer, _KEPT):  # an update ended half-way
            continue
        kept = dict(layer._parameters)
        kernel = layer.scheme.kernel_config
        inputs, outputs = kernel.partition_weight_shape
        with torch.device(kept["weight_packed"].device):
            layer.scheme.create_weights(
                layer,
                input_size=kernel.full_weight_shape[0],
                output_size=kernel.full_weight_shape[1],
                input_size_per_partition=inputs,
                output_partition_sizes=[outputs],
                params_dtype=kernel.act_type,
                weight_loader=kept["weight_shape"].weight_loader,
            )
        for name, old in kept.items():
            made = layer._parameters[name]
            if made is not old:
                made.data = old.data.view(made.shape)
        setattr(layer, _KEPT, (kept, layer.scheme.workspace))


@torch.inference_mode(mode=False)
@torch.no_grad()
def pack(model: torch.nn.Module) -> None:
    """Have SGLang repack what was loaded since ``unpack``."""
    for layer in _repacked(model):
        if not hasattr(layer, _KEPT):
            continue
        kept, workspace = getattr(layer, _KEPT)
        layer.scheme.process_weights_after_loading(layer)
        layer.scheme.workspace = workspace
        for name, old in kept.items():
            made = layer._parameters[name]
            if made is not old:
                old.data.copy_(made.data)
                layer._parameters[name] = old
        delattr(layer, _KEPT)


def _repacked(model: torch.nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if layer._parameters.get("weight_packed") is not None)
