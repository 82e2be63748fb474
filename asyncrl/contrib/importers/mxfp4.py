"""4-bit weights of experts (OCP Microscaling Formats 1.0, MXFP4), as gpt-oss is published.

Numbers are e2m1, two in a byte, the first in the lower bits. 32 neighbours in a row share a scale, a power of two
(e8m0). The matrices of all experts of a layer are two tensors: ``gate_up_proj_blocks`` and ``gate_up_proj_scales``.
Test: tests/unit/contrib/importers/test_mxfp4.py.
"""

from __future__ import annotations

from typing import Final

import torch

GROUP: Final = 32
"""Numbers that share a scale."""
_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_BIAS: Final = 127
"""Of the scale's exponent."""
_NO_NUMBER: Final = 255
"""The scale that is NaN."""
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_scale(name: str) -> bool:
    return name.endswith(_SCALES)


def is_quantized(name: str) -> bool:
    return name.endswith(_BLOCKS)


def scale_of(name: str) -> str:
    """Return the name of the tensor with the scales of ``name``."""
    return name.removesuffix(_BLOCKS) + _SCALES


def whole_of(name: str) -> str:
    """Return the name of the same weights in bfloat16."""
    return name.removesuffix(_BLOCKS)


def whole_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of ``dequantize``'s result. Raises ValueError for blocks of another shape."""
    if len(blocks) != 4 or blocks[3] != GROUP // 2:
        raise ValueError(f"4-bit blocks must be [experts, rows, groups, {GROUP // 2}], are {list(blocks)}")
    experts, rows, groups, _ = blocks
    return experts, groups * GROUP, rows


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16[experts, groups x 32, rows] from blocks u8[experts, rows, groups, 16], scales u8[experts, rows,
    groups].

    Rows become columns: gpt-oss's matrices in bfloat16 are [experts, inputs, outputs]. Needs memory for one expert
    besides the result. Raises ValueError for scales of another shape, or that are NaN.
    """
    if tuple(scales.shape) != tuple(blocks.shape[:3]):
        raise ValueError(f"scales of {list(blocks.shape)} must be {list(blocks.shape[:3])}, are {list(scales.shape)}")
    if (scales == _NO_NUMBER).any():
        raise ValueError("a scale is no number")
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # of every byte
    found = torch.empty(whole_shape(tuple(blocks.shape)), dtype=torch.bfloat16)
    for of_expert, expert, scale in zip(found, blocks, scales, strict=True):
        rows = pairs[expert.int()].flatten(-2)  # [rows, groups, 32]
        of_expert.copy_(torch.ldexp(rows, (scale.int() - _BIAS)[..., None]).flatten(1).t())
    return found
