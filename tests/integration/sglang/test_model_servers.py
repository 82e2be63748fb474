"""A real SGLang server as a judge and as a teacher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.actors.rollout.teacher import Teacher
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.errors import RewardError
from asyncrl.messages.control import ServerAddress
from tests.harness.engines import PROMPT, TOLERANCE, Model
from tests.harness.rewards import load, sample

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.fixture
def servers(old_sglang_server: SGLangEngine) -> dict[str, ServerAddress]:
    return {"big": ServerAddress(name="big", url=f"{old_sglang_server.url}/v1", model="default")}


@pytest.mark.parametrize("kind", ["sglang", "openai"])
async def test_its_logprobs_of_an_answer_are_those_of_the_model(
    servers: dict[str, ServerAddress], old_model: Model, kind: str
) -> None:
    teacher = Teacher("big", kind=kind, tokenizer=old_model.tokenizer)
    tokens = np.random.default_rng(0).integers(4, 30, 40).astype(np.int32)
    for answer in (tokens, tokens[:1]):
        found = await teacher.score(PROMPT, answer, servers=servers)
        assert np.abs(found.logprobs - old_model.logprobs(PROMPT, answer)).max() < TOLERANCE
    await teacher.close()


async def test_it_is_asked_as_a_judge(servers: dict[str, ServerAddress]) -> None:
    """A random model gives no grade, and that is what the group fails with."""
    reward = load("llm_judge", server="big", retries=1, max_tokens=8, timeout_seconds=60.0)
    with pytest.raises(RewardError, match="server big: after 2 tries: (its reply reached|no grade)"):
        await reward([replace(sample("7"), servers=servers)] * 2)
    await reward.close()
