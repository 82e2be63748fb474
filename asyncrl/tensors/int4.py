"""4-bit weights for engines: integers from -8 to 7 in groups of 32 inputs, each group with a bfloat16 scale.

This is the "pack-quantized" format of compressed-tensors, as in Kimi-K2-Thinking's folders. A matrix W [R, C] becomes
``weight_packed`` (eight integers in an int32), ``weight_scale`` and ``weight_shape``.
Test: tests/unit/tensors/test_int4.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from asyncrl.tensors.adapter_names import module_of

GROUP: Final = 32
"""Inputs that share a scale. Smaller groups have smaller errors; SGLang's kernels take 32, 64 and 128."""
TILE: Final = 128
"""SGLang's kernels take inputs in multiples of it."""
IN_A_WORD: Final = 8
_OFFSET: Final = 8
"""Integers are stored as 0 to 15."""
_STEPS: Final = 7.5
"""Half the number of steps between -8 and 7: the largest magnitude of a group is this many scales."""
PACKED: Final = "_packed"

_WEIGHTS: Final[dict[str, Any]] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "dynamic": False,
}
CONFIG: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
"""The quantization_config in config.json."""


def group_of(config: Mapping[str, Any]) -> int:
    """Return the group size in a quantization_config of this format; 0 for other formats of compressed-tensors."""
    groups = config.get("config_groups")
    if config.get("format") != CONFIG["format"] or not isinstance(groups, dict) or len(groups) != 1:
        return 0
    (found,) = groups.values()
    weights = found.get("weights") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or found.get("input_activations"):
        return 0
    group = weights.get("group_size")
    is_same = all(weights.get(key) == _WEIGHTS[key] for key in ("num_bits", "type", "symmetric", "strategy"))
    return group if is_same and not weights.get("actorder") and type(group) is int and group > 0 else 0


def quantize_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors``, replacing each matrix of a layer by its packed integers, their scales, and its shape."""
    for name, tensor in tensors:
        if not module_of(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        packed, scale = quantize(tensor)
        yield name + PACKED, packed
        yield name + "_scale", scale
        yield name + "_shape", torch.tensor(tensor.shape, device=tensor.device)


@torch.no_grad()
def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32[R, C / 8] and bf16[R, C / 32]. Raises ValueError unless 32 divides C.

    The error is at most half a scale, and a little more where a scale was rounded down to bfloat16.
    """
    rows, columns = matrix.shape
    if columns % GROUP:
        raise ValueError(f"a matrix [{rows}, {columns}] has no groups of {GROUP} inputs")
    groups = matrix.float().view(rows, -1, GROUP)
    scale = (groups.abs().amax(dim=2, keepdim=True) / _STEPS).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale)
    whole = (groups / scale.float()).round_().clamp_(-_OFFSET, _OFFSET - 1).add_(_OFFSET).to(torch.uint8)
    pairs = whole.view(rows, -1, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)  # the first integer is in the lowest bits
    return packed, scale.squeeze(2)


def dequantize(packed: torch.Tensor, scale: torch.Tensor, *, group: int = GROUP) -> torch.Tensor:
    """Return bf16[R, C], as SGLang's kernels see it, from int32[R, C / 8] and scales bf16[R, C / ``group``].

    Raises ValueError for scales of another shape.
    """
    if packed.ndim != 2 or packed.shape[1] * IN_A_WORD % group:
        raise ValueError(f"packed integers of shape {list(packed.shape)} are no matrix in groups of {group}")
    rows, columns = packed.shape[0], packed.shape[1] * IN_A_WORD
    if tuple(scale.shape) != (rows, columns // group):
        raise ValueError(f"scales of [{rows}, {columns}] must be {(rows, columns // group)}, are {tuple(scale.shape)}")
    pairs = packed.contiguous().view(torch.uint8)
    whole = torch.stack((pairs & 15, pairs >> 4), dim=2).view(rows, -1, group).float() - _OFFSET
    return (whole * scale.float().unsqueeze(2)).bfloat16().view(rows, columns)
