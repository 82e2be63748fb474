"""Architectures that the reference backend alone trains: engine, learner and exported weights agree."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl.data.model_folder import OF_REFERENCE_ALONE, check_model, require_supported
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.errors import ConfigError
from asyncrl.messages import SamplingParams
from tests.harness.backends import forward, sequence, started, weights
from tests.harness.engines import announce
from tests.harness.packing import pack

SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)


def tiny(folder: Path, architecture: str) -> Path:
    config = architecture.removesuffix("ForCausalLM") + "Config"
    return make_tiny_model(folder, architecture=config, initializer_range=0.15)


@pytest.mark.parametrize("architecture", OF_REFERENCE_ALONE)
async def test_an_engine_samples_from_what_the_learner_trains_and_exports(architecture: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", architecture)
    assert check_model(folder).architecture == architecture
    require_supported("model.path", folder, backend="reference")
    with pytest.raises(ConfigError, match=f'backend = "megatron" does not train {architecture}; use "reference"'):
        require_supported("model.path", folder)
    given = sequence(24, seed=0)
    (packed,) = pack([given], max_tokens=100)
    with started("reference", folder) as backend:
        before, exported = forward(backend, "reference", packed), weights(backend)
        backend.step([[packed]], learning_rate=0.01)
        after = weights(backend)
        trained = forward(backend, "reference", packed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor(given.tokens)[None].long()).logits[0, :-1], -1)
    own = expected.gather(-1, torch.tensor(given.tokens[1:, None]).long())[:, 0].numpy()
    np.testing.assert_allclose(before[given.response_mask], own[given.response_mask[1:]], atol=1e-5)
    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert np.abs(trained - before).max() > 1e-3

    newer = shutil.copytree(folder, tmp_path / "newer")
    save_file(after, newer / "model.safetensors", metadata={"format": "pt"})
    options = inprocess.Options(threads=1)
    engine = inprocess.InProcessEngine(folder, device="cpu", dtype="float32", version=(0, 0), options=options)
    await engine.start()
    try:
        await engine.load(announce(newer, 1))
        prompts = [given.tokens[:5], given.tokens[:9]]
        answers = await asyncio.gather(*(engine.generate(prompt, SAMPLING, seed=1) for prompt in prompts))
    finally:
        await engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(newer, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(np.concatenate([prompt, answer.tokens])).long()
        with torch.no_grad():
            distribution = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        logprobs = distribution.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-5)


def test_a_model_whose_logits_are_scaled_after_the_output_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohere's are, by logit_scale."""
    monkeypatch.setattr("asyncrl.backends.reference.OF_REFERENCE_ALONE", ("CohereForCausalLM",))
    folder = tiny(tmp_path, "CohereForCausalLM")
    refused = pytest.raises(ConfigError, match="its CohereForCausalLM changes logits after the output layer")
    with refused, started("reference", folder):
        raise AssertionError("it started")
