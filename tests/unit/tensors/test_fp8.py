"""8-bit weights: their values and their distance from the original."""

from __future__ import annotations

import pytest
import torch

from asyncrl.tensors import fp8


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32[R, C]: each element times the scale of its block."""
    rows, columns = weight.shape
    each = scale.repeat_interleave(fp8.BLOCK, 0).repeat_interleave(fp8.BLOCK, 1)
    return weight.float() * each[:rows, :columns]


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (200, 300), (3, 5)])
def test_a_matrix_is_off_by_no_more_than_e4m3_rounds(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[0] *= 50  # gives the blocks different scales
    weight, scale = fp8.quantize(matrix)
    assert (weight.dtype, weight.shape) == (torch.float8_e4m3fn, matrix.shape)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, tuple(-(-size // 128) for size in shape))
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of a normal number, and 2^-10 scales below 2^-6 scales.
    bound = torch.maximum(matrix.abs() / 16, whole / 1024) * (1 + 1e-5)
    assert ((dequantized(weight, scale) - matrix).abs() <= bound).all()


def test_scales_are_worked_by_hand() -> None:
    matrix = torch.zeros(256, 128)
    matrix[0, 0], matrix[1, 1], matrix[200, 7] = 448.0, 3.0, -7.0  # 448 / 448 = 1, 7 / 448 = 1/64
    weight, scale = fp8.quantize(matrix)
    assert scale.tolist() == [[1.0], [0.015625]]
    assert [weight[0, 0].float(), weight[1, 1].float(), weight[200, 7].float()] == [448.0, 3.0, -448.0]
    assert fp8.quantize(torch.zeros(128, 128))[1].tolist() == [[1.0]]  # no 0 / 0


def test_quantizing_twice_changes_nothing() -> None:
    weight, scale = fp8.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    again, same = fp8.quantize(dequantized(weight, scale))
    assert torch.equal(weight.float(), again.float())
    torch.testing.assert_close(scale, same)
