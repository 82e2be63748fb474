"""4-bit weights of experts become the bfloat16 numbers that transformers makes of them."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from asyncrl.contrib.importers import mxfp4


def test_every_byte_and_scale_is_what_transformers_makes_of_it() -> None:
    """All bytes, with exponents as trained weights have them and far beyond; the result has rows as columns."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), generator=random, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(60, 190, (2, 3, 4), generator=random, dtype=torch.uint8)
    found = mxfp4.dequantize(blocks, scales)
    assert found.shape == mxfp4.whole_shape((2, 3, 4, 16)) == (2, 128, 3)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


def test_two_values_of_a_byte_by_hand() -> None:
    """0xB3 is 1.5 in its lower half and -1.5 in its upper; 2^(129 - 127) makes them 6 and -6."""
    blocks = torch.full((1, 1, 1, 16), 0xB3, dtype=torch.uint8)
    found = mxfp4.dequantize(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8))
    assert found[0, :4, 0].tolist() == [6.0, -6.0, 6.0, -6.0]
