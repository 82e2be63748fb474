"""The entry for external producers: a plain HTTP client plays workers' samples, and each sample ends with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agent.entry import Entry
from asyncrl.environments.agent.function import Agent, Options
from asyncrl.errors import RolloutError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory
from tests.harness.agents import TOKENIZER, Scripted

KEY = "a-key"


def ask(url: str, body: Any = None, *, key: str = KEY, path: str = "/sessions") -> tuple[int, Any]:
    """Return status and reply of a plain HTTP client's request; GET if there is no body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def asked(url: str, *arguments: Any, **named: Any) -> tuple[int, Any]:
    return await asyncio.to_thread(ask, url, *arguments, **named)


async def said(session: dict[str, Any]) -> str:
    """Return the model's answer to the session's prompt."""
    body = {"model": session["model"], "messages": session["task"]["messages"]}
    status, reply = await asked(session["base_url"], body, key=session["api_key"], path="/v1/chat/completions")
    assert status == 200, reply
    return str(reply["choices"][0]["message"]["content"])


def group(number: int, **fields: Any) -> PromptGroup:
    return PromptGroup(
        group_id=number,
        prompt_tokens=[1, 2],
        group_size=2,
        sampling=SamplingParams(max_new_tokens=900),
        prompt=f"question {number}",
        **fields,
    )


@contextlib.asynccontextmanager
async def worker(url: str, folder: Path, **options: Any) -> AsyncIterator[Agent]:
    (folder / "key").write_text(KEY)
    harness = {"url": url, "key_file": str(folder / "key")}
    made = Agent(TOKENIZER, Options(harness="outside", harness_options=harness, **options))
    try:
        yield made
    finally:
        await made.close()


async def until(url: str, **counts: int) -> None:
    """Wait until the entry reports these counts."""
    while not counts.items() <= (await asked(url))[1].items():
        await asyncio.sleep(0.01)


async def test_a_producer_plays_samples_of_several_workers_the_oldest_group_first(tmp_path: Path) -> None:
    async with (
        Entry(host="127.0.0.1", port=0, key=KEY).serving() as entry,
        worker(entry.url, tmp_path) as one,
        worker(entry.url, tmp_path) as other,
        asyncio.TaskGroup() as tasks,
    ):
        engines = [Scripted(["one"]), Scripted(["two"]), Scripted(["three"])]
        late = tasks.create_task(one(group(8, metadata={"task": 3}), engines[2], index=0))
        await until(entry.url, waiting=1)
        first = tasks.create_task(one(group(7, label="9"), engines[0], index=0))
        second = tasks.create_task(other(group(7, label="9"), engines[1], index=1))
        await until(entry.url, waiting=3)
        wished = (await asked(entry.url, {"metadata": {"task": 3}}))[1]
        assert wished["task"]["group_id"] == 8
        sessions = [(await asked(entry.url, {}))[1] for _ in range(2)]
        assert [session["task"]["index"] for session in sessions] == [0, 1]
        assert sessions[0]["task"]["label"] == "9"
        assert (await asked(entry.url, {"wait_seconds": 0.01})) == (204, None)
        for reward, session in enumerate([*sessions, wished]):
            await said(session)
            done = {"reward": reward, "reward_parts": {"style": 0.5}}
            status, reply = await asked(entry.url, done, path=f"/sessions/{session['session']}/end")
            assert (status, reply["state"]) == (200, "ended")
        made: list[Trajectory] = [part for task in (first, second, late) for part in await task]
        assert [one.reward for one in made] == [0.0, 1.0, 2.0]
        assert [one.tokens.tolist() for one in made] == [engine.answers[0].tokens.tolist() for engine in engines]
        again = await asked(entry.url, {"reward": 5}, path=f"/sessions/{wished['session']}/end")
        assert again[0] == 200, "it is the same end: its answer may have been lost"
        await until(entry.url, waiting=0, playing=0, started=3, ended=3)
        assert (await asked(sessions[0]["base_url"], {}, key=sessions[0]["api_key"], path="/v1/messages"))[0] == 401


async def test_a_session_that_is_abandoned_or_out_of_time_fails_its_sample_with_the_reason(tmp_path: Path) -> None:
    async with Entry(host="127.0.0.1", port=0, key=KEY).serving() as entry, asyncio.TaskGroup() as tasks:
        async with worker(entry.url, tmp_path, timeout_seconds=0.05, on_timeout="fail") as short:
            sample = tasks.create_task(outcome(short, group(1)))
            await until(entry.url, waiting=1)
            await asyncio.sleep(0.1)  # longer than the limit, but no producer has begun it
            session = (await asked(entry.url, {}))[1]
            assert "took longer than timeout_seconds" in await sample
            status, reply = await asked(entry.url, {"reward": 1}, path=f"/sessions/{session['session']}/end")
            assert (status, "timeout_seconds" in reply["error"]) == (410, True)
        async with worker(entry.url, tmp_path) as long:
            sample = tasks.create_task(outcome(long, group(2)))
            session = (await asked(entry.url, {"wait_seconds": 30}))[1]
            path = f"/sessions/{session['session']}"
            assert (await asked(entry.url, {"reason": "the game\nhung"}, path=f"{path}/abandon"))[0] == 200
            assert "abandoned: the game hung" in await sample
            assert (await asked(entry.url, {"reward": 1}, path=f"{path}/end"))[0] == 410
        await until(entry.url, started=2, over=1, abandoned=1, ended=0, playing=0)


async def test_restarted_entry_continues_its_workers_sessions(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        first = contextlib.AsyncExitStack()
        entry = await first.enter_async_context(Entry(host="127.0.0.1", port=0, key=KEY).serving())
        url, port = entry.url, int(entry.url.rpartition(":")[2])
        made = await stack.enter_async_context(worker(url, tmp_path))
        samples = [tasks.create_task(made(group(4), Scripted(["yes"]), index=index)) for index in range(2)]
        await until(url, waiting=2)
        session = (await asked(url, {}))[1]
        await first.aclose()
        await stack.enter_async_context(Entry(host="127.0.0.1", port=port, key=KEY).serving())
        await until(url, waiting=1, playing=1)  # the session is not handed out again
        await said(session)
        assert (await asked(url, {"reward": 1}, path=f"/sessions/{session['session']}/end"))[0] == 200
        other = (await asked(url, {}))[1]
        assert {session["task"]["index"], other["task"]["index"]} == {0, 1}
        await said(other)
        await asked(url, {"reward": 0}, path=f"/sessions/{other['session']}/end")
        assert sorted([(await sample)[0].reward for sample in samples]) == [0.0, 1.0]


async def test_a_worker_that_leaves_takes_its_sessions_back(tmp_path: Path) -> None:
    async with Entry(host="127.0.0.1", port=0, key=KEY).serving() as entry, worker(entry.url, tmp_path) as made:
        sample = asyncio.ensure_future(made(group(5), Scripted(["yes"]), index=0))
        session = (await asked(entry.url, {"wait_seconds": 30}))[1]
        sample.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sample
        await until(entry.url, playing=0, over=1)
        status, reply = await asked(entry.url, {"reward": 1}, path=f"/sessions/{session['session']}/end")
        assert (status, "made again" in reply["error"]) == (410, True)


async def test_what_is_asked_wrongly_is_refused_with_a_reason_and_ends_nothing(tmp_path: Path) -> None:
    async with Entry(host="127.0.0.1", port=0, key=KEY).serving() as entry, worker(entry.url, tmp_path) as made:
        sample = asyncio.ensure_future(made(group(6), Scripted(["yes"]), index=0))
        assert (await asked(entry.url, {}, key="another"))[0] == 401
        assert (await asked(entry.url, [1]))[0] == 400
        for body in ({"wait_seconds": -1}, {"wait_seconds": "1"}, {"metadata": 1}, {"tasks": 1}):
            status, reply = await asked(entry.url, body)
            assert (status, list(reply)) == (400, ["error"])
        session = (await asked(entry.url, {"wait_seconds": 30}))[1]
        path = f"/sessions/{session['session']}/end"
        nan = ({"reward": float("nan")}, {"reward": 1, "metrics": {"\ud800": 1}})
        for wrong in ({}, *nan, {"reward": "1"}, {"reward": 1, "rewards": 2}, {"reward": 1, "turn_rewards": 1}):
            assert (await asked(entry.url, wrong, path=path))[0] == 400
        assert (await asked(entry.url, {"reward": 1}, path="/sessions/none/end"))[0] == 404
        await said(session)
        assert (await asked(entry.url, {"reward": 1}, path=path))[0] == 200
        assert (await sample)[0].reward == 1.0


async def test_a_producer_that_lost_the_answer_asks_again_at_once(tmp_path: Path) -> None:
    async with Entry(host="127.0.0.1", port=0, key=KEY).serving() as entry, worker(entry.url, tmp_path) as made:
        sample = asyncio.ensure_future(made(group(6), Scripted(["yes"]), index=0))
        session = (await asked(entry.url, {"wait_seconds": 30}))[1]
        path = f"/sessions/{session['session']}/end"
        await said(session)
        both = await asyncio.gather(*(asked(entry.url, {"reward": 1}, path=path) for _ in range(2)))
        assert [status for status, _ in both] == [200, 200]
        assert (await sample)[0].reward == 1.0
        await until(entry.url, ended=1, over=0, playing=0)


async def outcome(agent: Agent, prompt: PromptGroup) -> str:
    """Return the reason why the sample fails."""
    with pytest.raises(RolloutError) as error:
        await agent(prompt, Scripted(["yes"]), index=0)
    return str(error.value)
