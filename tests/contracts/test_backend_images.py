"""The contract of both backends for models that read images: logprobs, gradients and weights equal transformers'."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.backends.optimizer_settings import Lora
from asyncrl.config.learner import VISION_TOWER
from asyncrl.policies.batching.packing import sequence_slices
from asyncrl.tensors.adapter_names import module_name
from asyncrl.tensors.transformers_models import by_names_in_files
from tests.harness.backends import LEARNING_RATE, SETTINGS, forward, shares, started, weights
from tests.harness.images import (
    FAMILIES,
    expected_of,
    pictured_sequences,
    tiny_vision_model,
    vision_model,
    with_gradients,
)
from tests.harness.packing import pack

KINDS = ("reference", "megatron-1")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("trains_vision", [False, True], ids=["frozen tower", "trained tower"])
def test_logprobs_an_export_and_a_step_are_those_of_transformers(kind: str, folder: Path, trains_vision: bool) -> None:
    """The step has an eps of 0.1. With a small eps the first step is only the gradient's sign and would hide a wrong
    factor."""
    frozen = () if trains_vision else (VISION_TOWER,)
    settings = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e9, freeze=frozen)
    batch = pictured_sequences(folder)
    (packed,) = pack(batch, max_tokens=1000)
    assert len(packed.images) == 5
    with started(kind, folder, optimizer=settings) as backend:
        logprobs = forward(backend, kind, packed)
        exported = weights(backend)
        backend.step(shares(kind, batch), learning_rate=0.1)
        trained = weights(backend)
    model = with_gradients(vision_model(folder), batch)
    expected = expected_of(model, batch)
    for where, number in zip(sequence_slices(packed), packed.sequences, strict=True):
        np.testing.assert_allclose(logprobs[where], expected[number], atol=2e-5)

    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name

    def named() -> dict[str, torch.Tensor]:
        found = {name: p.detach() for name, p in model.named_parameters()}
        return by_names_in_files(found, model_type=model.config.model_type)

    before = {name: tensor.clone() for name, tensor in named().items()}
    free = {name: p for name, p in model.named_parameters() if trains_vision or ".visual." not in name}
    groups = [{"params": [p], "weight_decay": 0.0 if p.ndim == 1 else settings.weight_decay} for p in free.values()]
    torch.optim.AdamW(groups, lr=0.1, betas=settings.betas, eps=settings.eps).step()
    moved_tower = False
    for name, weight in named().items():
        moved = float((weight - before[name]).abs().max())
        moved_tower |= "visual." in name and moved > 1e-4
        assert float((trained[name] - weight).abs().max()) < 3e-4 * moved + 2e-6, name
    assert moved_tower == trains_vision


def test_adapters_are_of_the_decoder_alone(tmp_path: Path) -> None:
    """Qwen2.5-VL's tower has matrices of the same names."""
    folder = tiny_vision_model(tmp_path, architecture="qwen2_5_vl")
    settings = dataclasses.replace(SETTINGS, lora=Lora(rank=4, alpha=8.0, modules=("all-linear",)))
    batch = pictured_sequences(folder)
    with started("megatron-1", folder, optimizer=settings) as backend:
        before = weights(backend)
        for _ in range(2):  # up begins as zeros: the first step moves nothing else
            backend.step(shares("megatron-1", batch), learning_rate=LEARNING_RATE)
        after = weights(backend)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if ".layers." in name and module_name(name)}
