"""Adapters of a mixture's attention in a real SGLang server: it samples what the learner computes with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.backends.optimizer_settings import Lora
from asyncrl.config import only_overrides
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.messages import SamplingParams
from asyncrl.weights.files import FilesChannel
from tests.harness.backends import SETTINGS, forward, sequence, sequences, shares, started, tiny_model
from tests.harness.forked import ForkServer
from tests.harness.forked_sglang import forking
from tests.harness.packing import pack

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = Lora(rank=4, alpha=8.0, modules=ATTENTION, is_merged=False)
PROMPT = np.array([5, 9, 17, 3, 22], np.int32)
SAMPLING = SamplingParams(max_new_tokens=40, ignore_eos=True)
TOLERANCE = 1e-4
RUN = (
    'engine.kind="sglang"',
    'engine.device="cpu"',
    "engine.options={server_arguments={max-total-tokens=5000}}",
    f"learner.lora={{rank=4, alpha=8.0, modules={list(ATTENTION)}, publish='adapter'}}",
)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "mixtral"])
async def test_adapters_of_a_mixture_are_published_alone_and_sampled_with(
    architecture: str, tmp_path: Path, sglang_forks: ForkServer
) -> None:
    """On a server of the engine's own, which is that of a run file."""
    folder = tiny_model(tmp_path / "model", architecture=architecture)
    channel = FilesChannel(tmp_path / "weights", keep=2, model_path=folder)
    run = only_overrides([f"model.path={folder}", f"run.directory={tmp_path / 'runs'}", *RUN])
    engine = SGLangEngine.build(run, name="w0")
    settings = dataclasses.replace(SETTINGS, lora=LORA, eps=1e-5)
    with started("megatron-1", folder, optimizer=settings) as backend:
        for number in range(4):
            backend.step(shares("megatron-1", sequences(number)), learning_rate=0.05)
        version = channel.publish(backend.export(), incarnation=0, policy_version=1)
        policy: Any = backend
        adapters = policy._rank._loaded["policy"]._adapters.values()
        with forking(sglang_forks):
            await engine.start()
        try:
            for is_on in (False, True):
                if is_on:
                    report = await engine.load(version)
                    assert report.pause_seconds == 0.0
                answer = await engine.generate(PROMPT, SAMPLING, seed=1)
                tokens = np.concatenate([PROMPT, answer.tokens])
                (row,) = pack([dataclasses.replace(sequence(len(tokens), seed=0), tokens=tokens)], max_tokens=100)
                found = []
                for adapter_is_on in (is_on, not is_on):
                    for adapter in adapters:
                        adapter.is_on = adapter_is_on
                    found.append(forward(backend, "megatron-1", row)[len(PROMPT) :])
                np.testing.assert_allclose(answer.logprobs, found[0], atol=TOLERANCE)
                assert np.abs(answer.logprobs - found[1]).mean() > 0.1
        finally:
            await engine.close()
