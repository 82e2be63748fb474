"""A reward model behind SGLang's /classify: its score of each answer is the reward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from asyncrl.errors import ConfigError, RewardError
from asyncrl.messages.control import ServerAddress
from tests.harness.rewards import load, rewards, sample


class Server:
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: Any = None
        self.address = ServerAddress(name="rm", url="")

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.headers["Authorization"], body))
        scores = [{"embedding": [float(len(text))]} for text in body["text"]]
        return web.json_response(scores if self.answer is None else self.answer)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    application = web.Application()
    application.router.add_post("/classify", found.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    found.address = ServerAddress(name="rm", url=url, model="its name", key="k")
    yield found
    await runner.cleanup()


async def test_its_score_of_prompt_and_answer_is_the_reward(server: Server) -> None:
    reward = load("reward_model", server="rm", template="{prompt}|{completion}<end>")
    samples = [replace(sample(text, prompt="p"), servers={"rm": server.address}) for text in ("ab", "abcd", "ab")]
    assert [one.value for one in await rewards(reward, samples)] == [9.0, 11.0, 9.0]
    assert server.asked == [("Bearer k", {"model": "its name", "text": ["p|ab<end>", "p|abcd<end>"]})]
    await reward.close()


@pytest.mark.parametrize("answer", [[], [{"embedding": [0.1, 0.2]}], {"error": "no"}, [{"embedding": None}]])
async def test_what_is_no_score_fails_the_group(server: Server, answer: Any) -> None:
    server.answer = answer
    reward = load("reward_model", server="rm")
    with pytest.raises(RewardError, match="server rm: the answer is not one score per text"):
        await reward([replace(sample("ab"), servers={"rm": server.address})])
    await reward.close()


@pytest.mark.parametrize("template", ["{prompt}", "{label}{answer}", "{answer"])
def test_a_template_that_would_score_every_answer_alike_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="template: "):
        load("reward_model", server="rm", template=template)
