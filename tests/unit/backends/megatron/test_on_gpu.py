"""A Megatron learner in bfloat16 on a GPU, compared with the reference backend in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.backends.megatron.rank import use_device
from asyncrl.backends.megatron.rank_group import RankInfo
from asyncrl.policies.batching.packing import sequence_slices
from tests.harness.backends import (
    LEARNING_RATE,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.fixture(
    scope="module", params=["qwen3", "gemma3", "qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "gpt_oss"]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), architecture=request.param)


def test_a_step_in_bfloat16_is_close_to_the_reference(folder: Path) -> None:
    """The tolerances match test_bfloat16_trains_close_to_float32, which compares the same on the CPU."""
    with started("reference", folder) as backend:
        expected = backend.step(shares("reference", sequences()), learning_rate=LEARNING_RATE).metrics
        expected_weights = weights(backend)
    with started("megatron-1", folder, device="cuda", dtype="bfloat16") as backend:
        metrics = backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE).metrics
        exported = {name: tensor.cpu() for name, tensor in weights(backend).items()}
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert distance(exported, expected_weights) < 2**-7 * 2 + 2 * LEARNING_RATE


@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 1e-5, 1e-4), ("bfloat16", 0.05, 1.0)])
def test_logprobs_are_close_to_those_of_hugging_face(folder: Path, dtype: str, mean: float, largest: float) -> None:
    """Packed sequences attend only to themselves. bfloat16's 8 bits cause errors of a few hundredths; a mixture's
    errors are far larger where rounding selects other experts. transformers' own mixture in bfloat16 has 0.034 and 0.75
    here."""
    model = hugging_face(folder)
    (packed,) = pack(sequences(), max_tokens=1000)
    with started("megatron-1", folder, device="cuda", dtype=dtype) as backend:
        logprobs = forward(backend, "megatron-1", packed)
    expected = np.concatenate([expected_logprobs(model, packed.tokens[where]) for where in sequence_slices(packed)])
    errors = np.abs(logprobs - expected)
    assert errors.mean() < mean
    assert errors.max() < largest


def test_checkpoint_restores_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    batch = shares("megatron-1", sequences())
    with started("megatron-1", folder, device="cuda", dtype="bfloat16") as backend:
        backend.step(batch, learning_rate=LEARNING_RATE)
        backend.save(tmp_path)
        saved = {name: tensor.cpu() for name, tensor in weights(backend).items()}
    with started("megatron-1", folder, device="cuda", dtype="bfloat16") as backend:
        backend.restore(tmp_path)
        restored = {name: tensor.cpu() for name, tensor in weights(backend).items()}
    assert all(torch.equal(restored[name], saved[name]) for name in saved)


def test_a_learner_with_a_limit_gives_back_what_it_keeps_unused() -> None:
    limit = torch.cuda.memory_reserved() + 2**30
    device = use_device("cuda", RankInfo(), gpu_bytes=limit)
    try:
        for mib in (600, 700, 800):  # without a limit torch keeps all three
            torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
            assert torch.cuda.memory_reserved() <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
