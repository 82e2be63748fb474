"""The in-process engine alone: its output is repeatable, and its thread may end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncrl.engines.inprocess.decoder import Decoder
from asyncrl.errors import EngineDied, PromptError
from asyncrl.messages import SamplingParams
from tests.harness.engines import LONG, PROMPT, SHORT, TOLERANCE, Check, Model, start_inprocess

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("old"), seed=0)


async def test_same_seed_gives_same_tokens_bit_for_bit(old: Model) -> None:
    engine = await start_inprocess(old, max_batch_size=1)
    first, _other, again = [await engine.generate(PROMPT, SHORT, seed=seed) for seed in (5, 6, 5)]
    assert first.tokens.tobytes() == again.tokens.tobytes()
    assert first.logprobs.tobytes() == again.logprobs.tobytes()
    await engine.close()


async def test_batch_does_not_change_samples(old: Model) -> None:
    alone = await start_inprocess(old, max_batch_size=1)
    batched = await start_inprocess(old)
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [np.arange(4, 6 + n, dtype=np.int32) for n in range(16)]
    for prompt, generation in zip(
        prompts,
        await asyncio.gather(*(batched.generate(prompt, sampling, seed=n) for n, prompt in enumerate(prompts))),
        strict=True,
    ):
        expected = await alone.generate(prompt, sampling, seed=len(prompt) - 2)
        assert generation.tokens.tolist() == expected.tokens.tolist()
    await alone.close()
    await batched.close()


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "llama", "glm4", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"],
)
@pytest.mark.parametrize("tied", [False, True])
async def test_samples_correctly_for_each_architecture(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = Model(tmp_path / "a", seed=0, architecture=architecture, tie_word_embeddings=tied)
    other = Model(tmp_path / "b", seed=1, architecture=architecture, tie_word_embeddings=tied)
    engine = await start_inprocess(model)
    assert Check(model)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    await engine.load(other.version(2))
    assert Check(other)(await engine.generate(PROMPT, SHORT, seed=0)) < TOLERANCE
    await engine.close()


async def test_crash_of_decoding_fails_all_requests(old: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(_decoder: Decoder) -> None:
        raise MemoryError("out of memory")

    engine = await start_inprocess(old)
    running = asyncio.gather(*(engine.generate(PROMPT, LONG, seed=n) for n in range(3)), return_exceptions=True)
    await engine.generate(PROMPT, SHORT, seed=4)
    monkeypatch.setattr(Decoder, "step", step)
    async with asyncio.timeout(120):
        assert [type(error) for error in await running] == [EngineDied] * 3
    with pytest.raises(EngineDied, match="out of memory"):
        await engine.generate(PROMPT, SHORT, seed=0)
    with pytest.raises(EngineDied):
        await engine.load(old.version(2))
    await engine.close()


async def test_close_fails_requests_in_progress(old: Model) -> None:
    engine = await start_inprocess(old)
    task = asyncio.ensure_future(engine.generate(PROMPT, LONG, seed=0))
    await engine.generate(PROMPT, SHORT, seed=1)
    await engine.close()
    with pytest.raises(EngineDied, match="closed"):
        await task
    await engine.close()


async def test_unknown_stop_token_fails_only_its_request(old: Model) -> None:
    engine = await start_inprocess(old)
    sampling = SamplingParams(max_new_tokens=4, min_new_tokens=2, stop_token_ids=(10_000,))
    with pytest.raises(PromptError, match="stop_token_ids holds token 10000; the model knows 0.."):
        await engine.generate(PROMPT, sampling, seed=0)
    assert len((await engine.generate(PROMPT, SHORT, seed=0)).tokens) == 20
    await engine.close()
