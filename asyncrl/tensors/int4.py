"""4-bit weights for engines: symmetric integers with one scale for each 128 (or fewer) numbers of a row.

This is the format "pack-quantized" of compressed-tensors, which SGLang and vLLM load and Kimi-K2-Thinking is published
in: ``weight_packed`` holds eight numbers in an int32, the first in the lowest bits, each with 8 added; W is the number
x ``weight_scale``; ``weight_shape`` is the shape before packing.

Versions for engines (weights.quantization) have routed experts alone in 4 bits, as Kimi-K2-Thinking: SGLang repacks
weights after it has loaded them, and of this format it can undo that only for experts
(``restore_weights_before_loading``; engines/sglang/loader.py), so that nothing else can be loaded into a running
server.
Tests: tests/unit/contrib/importers/test_quantize.py, tests/unit/tensors/test_quantized_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from asyncrl.tensors.adapter_names import module_name

GROUP: Final = 128
GROUPS: Final[Mapping[str, int]] = {"int4": GROUP, "int4_group32": 32}
"""Values of weights.quantization, and how many numbers of a row share a scale."""
ALL_BUT_EXPERTS: Final = r"re:^(?!.*\.experts\.)"
"""Modules of versions that ``config`` ignores, as a regular expression of compressed-tensors."""
IN_INT32: Final = 8
_CHUNK: Final = 2**24
"""Numbers that are rounded at a time, some 20 bytes each."""
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


def is_of_experts(name: str) -> bool:
    """Whether this is a matrix of a routed expert."""
    return ".experts." in name and bool(module_name(name))


def quantize_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], *, group: int = GROUP, takes: Callable[[str], object] = module_name
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors``, replacing each matrix that ``takes`` says by three. Raises ValueError as ``quantize``."""
    for name, tensor in tensors:
        if not takes(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        try:
            packed, scale = quantize(tensor, group=group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        shape = torch.tensor(tensor.shape, device=tensor.device)
        yield from zip(names(name), (packed, scale, shape), strict=True)


def quantize_experts(tensors: Iterable[tuple[str, torch.Tensor]], *, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors``, replacing each matrix of a routed expert by three, with scales in bfloat16."""
    in_16_bits = ((name, one.bfloat16() if is_of_experts(name) else one) for name, one in tensors)
    return quantize_tensors(in_16_bits, group=group, takes=is_of_experts)


@torch.no_grad()
def round_weights(weights: torch.Tensor, *, group: int) -> torch.Tensor:
    """Return ``weights`` [experts, R, C] as engines have them: what ``dequantize`` makes of ``quantize_experts``, in
    the dtype of ``weights``. ``group`` must divide C."""
    rounded = torch.empty_like(weights)
    chunk = max(1, _CHUNK // weights[0].numel())
    for start in range(0, len(weights), chunk):
        part = weights[start : start + chunk]
        numbers, scale = _round(part.bfloat16(), group)
        rounded[start : start + chunk] = (numbers * scale.float()).bfloat16().view(part.shape)
    return rounded


@torch.no_grad()
def quantize(matrix: torch.Tensor, *, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Return i32[R, C / 8] and scales [R, C / group] in the dtype of ``matrix``.

    As compressed-tensors' observer "minmax": a group's largest magnitude is 7.5 x its scale, and numbers are rounded to
    -8..7. Raises ValueError if groups do not divide the columns.
    """
    rows, columns = matrix.shape
    if columns % group:
        raise ValueError(f"{columns} columns are no multiple of the {group} numbers that share a scale")
    numbers, scale = _round(matrix, group)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=matrix.device)
    words = (numbers.to(torch.int32).view(rows, -1, IN_INT32) + 8) << shifts
    return words.sum(-1, dtype=torch.int32), scale[..., 0].contiguous()


def _round(weights: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers f32[..., C / group, group] and their scales [..., C / group, 1] in the dtype of
    ``weights`` [..., C]."""
    groups = weights.float().reshape(*weights.shape[:-1], -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(weights.dtype)
    divisor = torch.where(scale > 0, scale.float(), 1.0)
    return (groups / divisor).round().clamp(-8, 7), scale


@torch.no_grad()
def dequantize(packed: torch.Tensor, scale: torch.Tensor, *, columns: int) -> torch.Tensor:
    """Return bf16[R, columns] from i32[R, columns / 8] and scales [R, groups]. Raises ValueError for other shapes."""
    rows = len(packed)
    if packed.dtype != torch.int32 or packed.shape[1] != -(-columns // IN_INT32):
        raise ValueError(f"{columns} columns of 4 bits are not packed as {packed.dtype}{list(packed.shape)}")
    if scale.ndim != 2 or len(scale) != rows or not scale.shape[1] or columns % scale.shape[1]:
        raise ValueError(f"scales of {rows} rows with {columns} columns cannot be {list(scale.shape)}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    numbers = ((packed[..., None] >> shifts) & 15).sub(8).view(rows, -1)[:, :columns]
    made = numbers.view(rows, scale.shape[1], -1) * scale.float()[..., None]
    return made.view(rows, columns).bfloat16()
