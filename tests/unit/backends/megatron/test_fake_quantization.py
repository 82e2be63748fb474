"""Quantization-aware training: the policy's experts compute with the numbers that engines have in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from asyncrl import config
from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.port import Backend
from asyncrl.contrib.importers.quantized_folder import import_folder
from asyncrl.errors import ConfigError
from asyncrl.tensors import int4, quantized_model
from asyncrl.weights.files import FilesChannel
from tests import ROOT
from tests.harness.backends import (
    expected_logprobs,
    forward,
    gradients_of_megatron,
    hugging_face,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

EXAMPLE = ROOT / "examples" / "gpu.toml"
KIND = "megatron-1"
INT4 = "int4_group32"
BATCH = sequences()
MASK = np.concatenate([one.response_mask for one in BATCH])
SMALL_RATE = 1e-6
"""A step of AdamW moves a weight by about this, a ten-thousandth of what it is rounded by."""
STEPS = 3


def publish(backend: Backend, model: Path, into: Path) -> Path:
    """Return a folder with the numbers of a version that engines load, in bfloat16."""
    channel = FilesChannel(into / "weights", keep=2, model_path=model, quantization=INT4)
    version = channel.publish(backend.export(), incarnation=0, policy_version=1)
    import_folder(Path(version.uri), into / "served")
    return into / "served"


def logprobs(backend: Backend) -> NDArray[np.float32]:
    return forward(backend, KIND, pack(BATCH, max_tokens=200)[0])[MASK]


def logprobs_of(folder: Path) -> NDArray[np.float32]:
    """Return those of transformers, which rounds nothing."""
    model = hugging_face(folder)
    return np.concatenate([expected_logprobs(model, one.tokens) for one in BATCH])[MASK]


@dataclass(frozen=True)
class Trained:
    """A run of a few small steps. ``logprobs`` and ``served``: before the first; ``gradients``: of the first."""

    model: Path
    served: Path
    checkpoint: Path
    logprobs: NDArray[np.float32]
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    model, checkpoint = tiny_model(folder / "model", architecture="qwen3_moe"), folder / "checkpoint"
    checkpoint.mkdir()
    with started(KIND, model, quantization=INT4) as backend:
        before, served = logprobs(backend), publish(backend, model, folder)
        backend.step(shares(KIND, BATCH), learning_rate=SMALL_RATE)
        gradients = {name: one.clone() for name, one in gradients_of_megatron(backend).items()}
        for _ in range(STEPS - 1):
            backend.step(shares(KIND, BATCH), learning_rate=SMALL_RATE)
        backend.save(checkpoint)
    return Trained(model, served, checkpoint, before, gradients)


def test_the_learner_computes_with_the_numbers_that_engines_have(trained: Trained) -> None:
    np.testing.assert_allclose(trained.logprobs, logprobs_of(trained.served), atol=1e-4)


def test_a_learner_that_does_not_round_is_off(trained: Trained) -> None:
    with started(KIND, trained.model, quantization=INT4, options={"fake_quantization": "off"}) as backend:
        difference = np.abs(logprobs(backend) - logprobs_of(trained.served))
    assert difference.mean() > 0.05


def test_gradients_are_those_of_the_rounded_weights(trained: Trained) -> None:
    with started(KIND, trained.served) as backend:
        backend.step(shares(KIND, BATCH), learning_rate=SMALL_RATE)
        expected = gradients_of_megatron(backend)
    assert trained.gradients.keys() == expected.keys()
    for name, gradient in trained.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        assert gradient.any() or "norm" in name, name


def test_steps_too_small_for_rounding_add_up_in_the_weights_that_checkpoints_hold(trained: Trained) -> None:
    with started(KIND, trained.model) as backend:
        backend.restore(trained.checkpoint)
        after = weights(backend)
    before = load_file(trained.model / "model.safetensors")
    experts = [name for name in before if int4.is_of_experts(name)]
    stays, moved = [], []
    for name in experts:
        numbers = [int4.quantize(one[name].bfloat16(), group=32)[0] for one in (before, after)]
        stays.append(torch.eq(*numbers).float().mean())
        moved.append(((after[name] - before[name]).abs() > 0.5 * STEPS * SMALL_RATE).float().mean())
    assert torch.stack(stays).mean() > 0.99
    assert torch.stack(moved).mean() > 0.5


def test_ranks_that_share_an_expert_round_as_one() -> None:
    """Each has some of the columns of the second matrix, and of the rows of the first."""
    whole = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1))
    rounded = int4.round_weights(whole, group=32)
    for dim in (1, 2):
        parts = [int4.round_weights(part, group=32) for part in whole.chunk(2, dim)]
        assert torch.equal(torch.cat(parts, dim), rounded)


def test_adapters_that_engines_would_round_with_the_weights_are_refused(trained: Trained) -> None:
    given = (f"model.path={trained.model}", f"weights.quantization={INT4}", "learner.backend=megatron")
    MegatronBackend.check(config.load(EXAMPLE, given))
    with pytest.raises(ConfigError, match=r"^weights.quantization: .* remove learner.lora, or set .*fake_quantization"):
        MegatronBackend.check(config.load(EXAMPLE, (*given, "learner.lora.rank=8")))
    off = "learner.options.fake_quantization=off"
    MegatronBackend.check(config.load(EXAMPLE, (*given, "learner.lora.rank=8", off)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", int4.GROUPS)
def test_rounding_is_packing_and_unpacking(dtype: torch.dtype, quantization: str) -> None:
    weights = torch.randn(3, 8, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights[1, 2] = 0
    rounded = int4.round_weights(weights, group=int4.GROUPS[quantization])
    assert rounded.dtype == dtype
    for whole, expected in zip(weights, rounded, strict=True):
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        made = dict(quantized_model.quantize_tensors([(name, whole)], quantization))
        packed, scale, shape = (made[one] for one in int4.names(name))
        assert shape.tolist() == [8, 256]
        assert torch.equal(int4.dequantize(packed, scale, columns=256).to(dtype), expected)
