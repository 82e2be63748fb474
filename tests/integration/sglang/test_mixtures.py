"""SGLang serves mixtures of experts: it says what transformers says, before and after a load of weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.engines.sglang.engine import Options, SGLangEngine
from tests.harness.engines import PROMPT, SHORT, TOLERANCE, Check, Model

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
async def test_a_server_of_a_mixture_samples_from_it_and_from_the_weights_it_is_given(
    tmp_path: Path, architecture: str
) -> None:
    old, new = (Model(tmp_path / str(seed), seed=seed, architecture=architecture) for seed in (0, 1))
    engine = SGLangEngine(
        old.folder,
        device="cpu",
        dtype="float32",
        version=(0, 0),
        options=Options(server_arguments={"max-total-tokens": 20_000}),
        log_path=tmp_path / "server.log",
    )
    await engine.start()
    try:
        for model, version in ((old, 0), (new, 2)):
            if version:
                await engine.load(model.version(version))
            generations = await asyncio.gather(*(engine.generate(PROMPT, SHORT, seed=seed) for seed in range(4)))
            assert max(map(Check(model), generations)) < TOLERANCE
    finally:
        await engine.close()
