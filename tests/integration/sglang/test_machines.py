"""A real SGLang server in two parts, as on two machines: it samples from the model, and switches its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncrl.engines.port import Meeting
from asyncrl.engines.sglang import engine as sglang
from asyncrl.engines.sglang.server import find_free_port
from asyncrl.messages import SamplingParams
from tests.harness.engines import PROMPT, Model

SAMPLING = SamplingParams(max_new_tokens=20, ignore_eos=True)
TOLERANCE = 1e-4


def part_of_engine(model: Model, log: Path) -> sglang.SGLangEngine:
    options = sglang.Options(machines=2, tensor_parallel=2, server_arguments={"max-total-tokens": 5_000})
    return sglang.SGLangEngine(
        model.folder, device="cpu", dtype="float32", version=(0, 0), options=options, log_path=log
    )


@pytest.mark.sglang
@pytest.mark.slow
async def test_an_engine_of_two_parts_samples_from_the_model_and_from_the_weights_of_the_next_version(
    old_model: Model, new_model: Model, tmp_path: Path
) -> None:
    meeting = Meeting(host="127.0.0.1", port=find_free_port(), worker="w0")
    engine, other = (part_of_engine(old_model, tmp_path / f"{number}.log") for number in (0, 1))
    engine.meet_at(meeting)
    joined = asyncio.create_task(other.join(meeting, seconds=60.0))
    try:
        await engine.start()
        for version, model in enumerate((old_model, new_model)):
            if version:
                await engine.load(model.version(version))
            answer = await engine.generate(PROMPT, SAMPLING, seed=1)
            assert {span.policy_version for span in answer.version_spans} == {version}
            np.testing.assert_allclose(answer.logprobs, model.logprobs(PROMPT, answer.tokens), atol=TOLERANCE)
        await engine.close()
        assert await joined == ""
    finally:
        joined.cancel()
        await asyncio.wait({joined})
        await engine.close()
