"""A reward from a server: the group is sent, and a failure there becomes the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.errors import Outage, RewardError
from asyncrl.rewards.port import Reward
from tests.harness.rewards import load, rewards, sample, values

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Yield ``await serve(handler)``, which returns the address of a server that answers with ``handler``."""
    runners: list[web.AppRunner] = []

    async def start(handler: Any) -> str:
        application = web.Application()
        application.router.add_post("/reward", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/reward"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_remote_sends_the_group_and_takes_numbers_and_parts(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["X-Key"], await request.json()))
        return web.json_response({"rewards": [0.5, {"format": 0.25, "correct": 1.0}]})

    reward = load("remote", url=await serve(handler), headers={"X-Key": "k"})
    first, second = await rewards(reward, [sample("a", label=1, prompt="p", metadata={"m": 2}), sample("b")])
    assert (first.value, second.value, second.parts) == (0.5, 1.25, {"format": 0.25, "correct": 1.0})
    await reward.close()
    sent = {"prompt": "p", "completion": "a", "label": 1, "metadata": {"m": 2}}
    assert seen[0][0] == "k" and seen[0][1]["samples"][0] == sent and len(seen[0][1]["samples"]) == 2


async def test_a_server_of_slimes_remote_rm_is_asked_for_each_answer_and_fails_that_alone(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        made = {"a": 1, "b": {"format": 0.25, "correct": 1.0}, "c": "good"}
        return web.json_response(made[seen[-1]["response"]])

    reward = load("remote_rm", url=await serve(handler))
    first, second, third = await reward([sample(text, label=1, prompt="p") for text in "abc"])
    await reward.close()
    assert isinstance(first, Reward) and isinstance(second, Reward) and isinstance(third, RewardError)
    assert (first.value, second.value) == (1.0, 1.25)
    assert {"prompt": "p", "response": "a", "label": 1} in seen and len(seen) == 3


async def test_remote_tries_again_when_the_server_is_busy(serve: Serve) -> None:
    answers = [web.Response(status=503), web.Response(status=429), web.json_response([1.0])]

    async def handler(request: web.Request) -> web.Response:
        return answers.pop(0)

    assert await values(load("remote", url=await serve(handler), backoff_seconds=0.0), sample()) == [1.0]


async def test_remote_gives_up_after_its_retries_and_never_retries_a_refusal(serve: Serve) -> None:
    calls: list[str] = []

    async def busy(request: web.Request) -> web.Response:
        calls.append("busy")
        return web.Response(status=500)

    async def refuses(request: web.Request) -> web.Response:
        calls.append("refuses")
        return web.Response(status=400, text="no such model\ndetails")

    url = await serve(busy)
    with pytest.raises(Outage, match="after 3 tries: HTTP 500"):  # which the worker waits for
        await values(load("remote", url=url, retries=2, backoff_seconds=0.0), sample())
    with pytest.raises(RewardError, match="HTTP 400 Bad Request: no such model$") as refused:
        await values(load("remote", url=await serve(refuses)), sample())
    assert not isinstance(refused.value, Outage)
    assert calls == ["busy"] * 3 + ["refuses"]


async def test_remote_refuses_an_answer_of_the_wrong_shape(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"scores": [1.0]})

    with pytest.raises(RewardError, match="must be"):
        await values(load("remote", url=await serve(handler)), sample())
