"""4-bit weights for engines: symmetric integers with one scale for each 128 (or fewer) numbers of a row.

This is the format "pack-quantized" of compressed-tensors, which SGLang and vLLM load and Kimi-K2-Thinking is published
in: ``weight_packed`` holds eight numbers in an int32, the first in the lowest bits, each with 8 added; W is the number
x ``weight_scale``; ``weight_shape`` is the shape before packing.
Test: tests/unit/contrib/importers/test_quantize.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from asyncrl.tensors.adapter_names import module_name

GROUP: Final = 128
IN_INT32: Final = 8
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"


def config(ignored: Sequence[str], *, group: int = GROUP) -> dict[str, Any]:
    """Return the quantization_config in config.json.  ignored: linear modules that are not quantized"""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "dynamic": False}}},
        "ignore": list(ignored),
    }


def is_packed(name: str) -> bool:
    return name.endswith(".weight" + _PACKED)


def is_beside(name: str) -> bool:
    """Whether the tensor is the scale or the shape of a packed matrix."""
    return name.endswith((".weight" + _SCALE, ".weight" + _SHAPE))


def names(whole: str) -> tuple[str, str, str]:
    """Return the names of the packed numbers, scales and shape of matrix ``whole``."""
    return whole + _PACKED, whole + _SCALE, whole + _SHAPE


def whole_name(packed: str) -> str:
    return packed.removesuffix(_PACKED)


def quantize_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], *, group: int = GROUP
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors``, replacing each matrix of a layer by three. Raises ValueError as ``quantize``."""
    for name, tensor in tensors:
        if not module_name(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        try:
            packed, scale = quantize(tensor, group=group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        yield from zip(names(name), (packed, scale, torch.tensor(tensor.shape)), strict=True)


@torch.no_grad()
def quantize(matrix: torch.Tensor, *, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Return i32[R, C / 8] and scales [R, C / group] in the dtype of ``matrix``.

    As compressed-tensors' observer "minmax": a group's largest magnitude is 7.5 x its scale, and numbers are rounded to
    -8..7. Raises ValueError if groups do not divide the columns.
    """
    rows, columns = matrix.shape
    if columns % group:
        raise ValueError(f"{columns} columns are no multiple of the {group} numbers that share a scale")
    groups = matrix.float().view(rows, -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(matrix.dtype)
    divisor = torch.where(scale > 0, scale.float(), 1.0)
    numbers = (groups / divisor).round().clamp(-8, 7).to(torch.int32).view(rows, -1, IN_INT32) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (numbers << shifts).sum(-1, dtype=torch.int32), scale[..., 0].contiguous()


@torch.no_grad()
def dequantize(packed: torch.Tensor, scale: torch.Tensor, *, columns: int) -> torch.Tensor:
    """Return bf16[R, columns] from i32[R, columns / 8] and scales [R, groups]. Raises ValueError for other shapes."""
    rows = len(packed)
    if packed.dtype != torch.int32 or packed.shape[1] != -(-columns // IN_INT32):
        raise ValueError(f"{columns} columns of 4 bits are not packed as {packed.dtype}{list(packed.shape)}")
    if scale.ndim != 2 or len(scale) != rows or not scale.shape[1] or columns % scale.shape[1]:
        raise ValueError(f"scales of {rows} rows with {columns} columns cannot be {list(scale.shape)}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = ((packed[..., None] >> shifts) & 15).sub(8).view(rows, -1)[:, :columns]
    made = numbers.view(rows, scale.shape[1], -1) * scale.float()[..., None]
    return made.view(rows, columns).bfloat16()
