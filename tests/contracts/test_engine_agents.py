"""An agent behind a worker's endpoint, over every engine: its answers are the sampled tokens, and these are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.engines.port import Engine
from asyncrl.messages import SamplingParams
from tests.harness.agents import Client, chat_format
from tests.harness.engines import TOLERANCE, Model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]


class Asking:
    """``Generate`` of one sample, as a worker makes it. Records the engine's inputs and outputs."""

    attempt = 1
    context_tokens = 4096

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.given: list[list[int]] = []
        self.answers: list[Generation] = []

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        number = len(self.given)
        self.given.append(tokens.tolist())
        sampling = SamplingParams(max_new_tokens=min(max_new_tokens or 12, 12))
        answer = await self._engine.generate(tokens, sampling, seed=number)
        self.answers.append(answer)
        return answer


async def test_an_agent_s_turns_are_trained_as_the_engine_sampled_them(engine: Engine, old: Model) -> None:
    """Three consecutive turns form one sequence: the history is never tokenised again."""
    asking = Asking(engine)
    async with Client(asking, chat_format=chat_format(old.tokenizer)) as client:
        messages: list[Any] = []
        for question in ("1+2=", "3+4=", "5+6="):
            messages.append({"role": "user", "content": question})
            messages.append(await client.say(messages))
    assert client.check() == 1
    for given, answer in zip(asking.given, asking.answers, strict=True):
        expected = old.logprobs(np.array(given, np.int32), answer.tokens)
        assert np.abs(expected - answer.logprobs).max() < TOLERANCE
