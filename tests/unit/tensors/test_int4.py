"""4-bit weights: their values, their distance from the original, and what compressed-tensors reads in them."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams

from asyncrl.tensors import int4


def random(rows: int, columns: int) -> torch.Tensor:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    matrix[:, :40] *= 50  # gives the groups different scales
    return matrix


def read(packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return f32[R, C], as compressed-tensors reads the two tensors under our config."""
    args = QuantizationArgs(**int4.CONFIG["config_groups"]["group_0"]["weights"])
    whole = unpack_from_int32(packed, args.num_bits, torch.Size(shape))
    return dequantize(whole, scale.float(), args=args, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(64, 128), (3, 32), (128, 384)])
def test_a_weight_is_off_by_no_more_than_half_a_step(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    packed, scale = int4.quantize(matrix)
    assert (packed.dtype, packed.shape) == (torch.int32, (shape[0], shape[1] // 8))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (shape[0], shape[1] // 32))
    # A scale is off by 2^-9 at most, so the largest number of a group may be 7.5 x (1 + 2^-8) steps, stored as 7.
    bound = scale.float().repeat_interleave(32, 1) * (0.5 + 7.5 / 2**8)
    assert ((read(packed, scale, shape) - matrix).abs() <= bound).all()


def test_compressed_tensors_reads_the_same_weights() -> None:
    matrix = random(64, 256)
    packed, scale = int4.quantize(matrix)
    assert torch.equal(read(packed, scale, (64, 256)).bfloat16(), int4.dequantize(packed, scale))


def test_compressed_tensors_would_choose_the_same_scales() -> None:
    matrix = random(64, 256)
    groups = matrix.view(64, -1, 32)
    args = QuantizationArgs(**int4.CONFIG["config_groups"]["group_0"]["weights"])
    expected, _zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
    assert torch.equal(int4.quantize(matrix)[1], expected.bfloat16())


def test_integers_are_worked_by_hand() -> None:
    matrix = torch.zeros(1, 64)
    matrix[0, :4] = torch.tensor([-7.5, 7.5, 2.0, -1.4])  # scale 1: -8 (ties to even), 7 (8 is cut), 2, -1
    packed, scale = int4.quantize(matrix)
    assert scale.tolist() == [[1.0, 1.0]]  # no 0 / 0 in the second group
    assert int4.quantize(torch.full((1, 32), 1e-40))[1].tolist() == [[1.0]]  # nor where bfloat16 has no such scale
    # Plus 8 each, first in the lowest bits: 0, 15, 10, 7, and 8 for zeros.
    assert packed[0, 0].item() & 0xFFFFFFFF == 0x88887AF0
    assert int4.dequantize(packed, scale)[0, :5].tolist() == [-8.0, 7.0, 2.0, -1.0, 0.0]


def test_matrices_of_layers_alone_get_three_tensors() -> None:
    given = {
        "model.embed_tokens.weight": torch.ones(4, 32),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(64, 32),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "model.layers.0.mlp.gate.weight": torch.ones(4, 32),
    }
    made = dict(int4.quantize_tensors(given.items()))
    matrix = "model.layers.0.self_attn.q_proj.weight"
    assert set(made) == set(given) - {matrix} | {f"{matrix}{end}" for end in ("_packed", "_scale", "_shape")}
    assert made[f"{matrix}_shape"].tolist() == [64, 32]
    assert made[f"{matrix}_shape"].dtype == torch.int64
    # 64 x 32 weights: 4 bits each, 64 scales of 2 bytes, and two numbers of 8 bytes.
    assert sum(one.nbytes for name, one in made.items() if name.startswith(matrix)) == 1024 + 128 + 16


def test_inputs_that_groups_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[64, 48\] has no groups of 32"):
        int4.quantize(torch.ones(64, 48))
    with pytest.raises(ValueError, match="must be"):
        int4.dequantize(torch.ones(4, 8, dtype=torch.int32), torch.ones(4, 1))


def test_packed_integers_that_are_no_matrix_in_whole_groups_are_refused() -> None:
    scales = torch.ones(2, 1, dtype=torch.bfloat16)
    for packed in (torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="no matrix in groups of 32"):
            int4.dequantize(packed, scales)
