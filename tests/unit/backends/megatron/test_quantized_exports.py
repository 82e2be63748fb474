"""Exports for quantized engines: the learner's own weights in the format of weights.quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.huggingface import read_shape
from asyncrl.backends.megatron.refusals import require_quantizable
from asyncrl.errors import ConfigError
from asyncrl.tensors import quantized_model
from tests.harness.backends import LEARNING_RATE, RANKS, sequences, shares, started, tiny_model, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


@pytest.mark.parametrize("quantization", ["fp8"])
@pytest.mark.parametrize("kind", ["megatron-1", pytest.param("megatron-tp2", marks=RANKS)])
def test_engines_get_the_trained_weights_in_their_format(kind: str, folder: Path, quantization: str) -> None:
    """With tensor parallelism a matrix is gathered first: its blocks are those of the whole matrix."""
    made = {}
    for wanted in ("", quantization):
        with started(kind, folder, quantization=wanted) as backend:
            backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
            made[wanted] = weights(backend)
    assert any(not torch.equal(one, made[""][name]) for name, one in load_file(folder / "model.safetensors").items())
    expected = dict(quantized_model.quantize_tensors(made[""].items(), quantization))
    assert made[quantization].keys() == expected.keys()
    for name, one in expected.items():
        assert made[quantization][name].dtype == one.dtype
        assert torch.equal(made[quantization][name].view(torch.uint8), one.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("quantization", ["fp8"])
@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("qwen3", "blocks of 128 numbers, and hidden_size is 64; remove it"),
        ("qwen3_moe", "was not tried with experts; remove it"),
        ("deepseek_v3", "was not tried with (experts|latent attention); remove it"),
    ],
)
def test_untested_quantized_model_is_refused(
    tmp_path: Path, quantization: str, architecture: str, problem: str
) -> None:
    shape: ModelShape = read_shape(tiny_model(tmp_path, architecture=architecture))
    with pytest.raises(ConfigError, match=f'weights.quantization: "{quantization}" .*{problem}') as caught:
        require_quantizable(shape, quantization)
    assert "\n" not in str(caught.value)
