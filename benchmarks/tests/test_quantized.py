"""The benchmark of quantized engines knows the weights that an engine has."""

from __future__ import annotations

import pytest
import torch

from asyncrl.tensors import fp8, int4, quantized_model
from asyncrl.tensors.snapshot import Snapshot
from benchmarks.gpu.quantized import dequantized


@pytest.mark.parametrize("quantization", ["", "fp8", "int4"])
def test_the_weights_of_a_version_are_read_back_in_every_format(quantization: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(128, 128, generator=generator).bfloat16()
    given = {"model.norm.weight": torch.ones(8), "model.layers.0.mlp.up_proj.weight": matrix}
    read = dict(dequantized(Snapshot.of(quantized_model.quantized(given.items(), quantization))))
    assert read.keys() == given.keys()
    expected = {
        "fp8": lambda: fp8.dequantize(*fp8.quantize(matrix)),
        "int4": lambda: int4.dequantize(*int4.quantize(matrix)),
    }
    assert torch.equal(read["model.layers.0.mlp.up_proj.weight"], expected.get(quantization, lambda: matrix)())
