"""8-bit weights for engines: e4m3 in 128 x 128 blocks, each with a float32 scale.

This is the format of DeepSeek-V3 (arXiv:2412.19437, 3.3.2) and of Qwen's FP8 models. W is ``weight`` x
``weight_scale_inv``, block by block.
Test: tests/unit/tensors/test_quantized_model.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.nn import functional as F

from asyncrl.tensors.adapter_names import module_name

BLOCK: Final = 128
_LARGEST: Final = 448.0
"""Largest magnitude in e4m3."""
_SCALE: Final = "_scale_inv"

CONFIG: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The quantization_config in config.json."""
ROUND: Final = "fp8_ue8m0"
"""The format whose scales are powers of two, as the UE8M0 of DeepSeek-V3.1 and of Blackwell's kernels."""


def config(quantization: str) -> dict[str, Any]:
    """Return the quantization_config of "fp8" or ROUND."""
    return CONFIG | ({"scale_fmt": "ue8m0"} if quantization == ROUND else {})


def is_scale(name: str) -> bool:
    return name.endswith(_SCALE)


def scale_name(name: str) -> str:
    """Return the name of the tensor that holds the block scales of matrix ``name``."""
    return name + _SCALE


def quantize_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], quantization: str = "fp8"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors``, replacing each matrix of a layer by its e4m3 weights and their block scales."""
    for name, tensor in tensors:
        if not module_name(name) or tensor.ndim != 2:
            yield name, tensor
            continue
        weight, scale = quantize(tensor, has_round_scales=quantization == ROUND)
        yield name, weight
        yield scale_name(name), scale


@torch.no_grad()
def quantize(matrix: torch.Tensor, *, has_round_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3[R, C] and f32[ceil(R / 128), ceil(C / 128)]. The largest magnitude in a block maps to 448.

    has_round_scales  scales are rounded up to powers of two, so the largest magnitude maps to 224 to 448
    """
    rows, columns = matrix.shape
    blocks = _blocks(matrix.float())
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    if has_round_scales:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa x 2^exponent, mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    whole = (blocks / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return whole[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def dequantize(matrix: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    """Return bf16[R, C] from e4m3[R, C] and scales f32[ceil(R / block[0]), ceil(C / block[1])].

    Raises ValueError for scales of another shape.
    """
    rows, columns = matrix.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scales of {tuple(matrix.shape)} must be {expected}, are {tuple(scale.shape)}")
    each = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return each.mul_(matrix.float()).bfloat16()


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Reshape [R, C] to [R / 128, 128, C / 128, 128], padded with zeros."""
    rows, columns = matrix.shape
    filled = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return filled.view(-(-rows // BLOCK), BLOCK, -1, BLOCK)
