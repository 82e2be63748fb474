"""SIGKILL of a rollout worker while external producers play its samples: the producers' answers, and what is
trained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.adapters import registry
from asyncrl.environments.agent.entry import Entry
from asyncrl.messages.roles import WORKER
from asyncrl.messages.topics import ACTORS, SEGMENTS
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess, within

pytestmark = pytest.mark.slow

PRODUCERS = 8
AGENT = """
rollout.options={
harness = "outside", timeout_seconds = 600.0, on_timeout = "fail",
chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}",
harness_options = { url = "URL", key_file = "serve.key" } }
""".replace("\n", "")
Sample = tuple[int, int]
"""Group and index."""


@dataclass
class Played:
    """What a producer received for one session."""

    sample: Sample
    said: list[str] = field(default_factory=list)
    end: int = 0
    reason: str = ""


class Producer:
    """Plays sessions of two calls, and waits between them while the gate is shut."""

    def __init__(self, url: str, key: str, gate: asyncio.Event) -> None:
        self._url, self._key, self._gate = url, key, gate
        self.sessions: list[Played] = []
        self.is_held = False

    async def play(self, http: aiohttp.ClientSession) -> None:
        while True:
            status, session = await self._post(http, f"{self._url}/sessions", {"wait_seconds": 30}, self._key)
            if status != 200:
                continue
            task = session["task"]
            played = Played(sample=(task["group_id"], task["index"]))
            self.sessions.append(played)
            messages = list(task["messages"])
            for call in range(2):
                if call:
                    self.is_held = True
                    await self._gate.wait()
                    self.is_held = False
                body = {"model": session["model"], "messages": messages, "max_tokens": 2}
                with contextlib.suppress(aiohttp.ClientError):  # its worker is gone
                    url = f"{session['base_url']}/v1/chat/completions"
                    status, reply = await self._post(http, url, body, session["api_key"])
                    assert status == 200, reply
                    played.said.append(reply["choices"][0]["message"]["content"])
                    messages += [reply["choices"][0]["message"], {"role": "user", "content": "7"}]
            url = f"{self._url}/sessions/{session['session']}/end"
            played.end, reply = await self._post(http, url, {"reward": task["index"] % 2}, self._key)
            played.reason = reply.get("error", "")

    async def _post(self, http: aiohttp.ClientSession, url: str, body: Any, key: str) -> tuple[int, Any]:
        async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
            return reply.status, (await reply.json() if reply.status != 204 else None)


@contextlib.asynccontextmanager
async def at_play(producers: list[Producer]) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as http:
        playing = [asyncio.create_task(one.play(http)) for one in producers]
        try:
            yield
            assert not any(task.done() for task in playing), [task for task in playing if task.done()]
        finally:
            for task in playing:
                task.cancel()
            await asyncio.wait(playing)


async def test_sessions_of_a_killed_worker_are_replayed_from_their_tokens(tmp_path: Path, forks: ForkServer) -> None:
    gate = asyncio.Event()
    gate.set()
    async with contextlib.AsyncExitStack() as stack:
        entry = await stack.enter_async_context(Entry(host="127.0.0.1", port=0, key="a-key").serving())
        agent = ("rollout.function=agent", "reward.kind=none", AGENT.replace("URL", entry.url))
        run = RunProcess(tmp_path, *agent, "rollout.partial_save_seconds=0.2", name="served", forks=forks)
        stack.callback(run.kill)
        (tmp_path / "serve.key").write_text("a-key")
        producers = [Producer(entry.url, "a-key", gate) for _ in range(PRODUCERS)]

        def sessions() -> list[Played]:
            return [session for one in producers for session in one.sessions]

        run.start()
        async with at_play(producers):
            await run.until(lambda: run.steps >= 2, "a step")
            gate.clear()
            await run.until(lambda: all(one.is_held for one in producers), "sessions of one call each")
            over = [one.sessions[-1] for one in producers]
            async with within("each session's first call is on the bus"):
                while not {one.sample for one in over} <= await saved_samples(run):
                    await asyncio.sleep(0.1)
            os.kill(await worker_pid(run), signal.SIGKILL)
            await run.until(lambda: "restart 1 of" in run.said, "its end")
            gate.set()
            await run.until(lambda: all(one.end for one in over), "what producers are told")
            steps = run.steps
            await run.until(lambda: run.steps >= steps + 3, "steps after it")
            lost_samples = {one.sample for one in over}
            await run.until(lambda: lost_samples <= {one.sample for one in sessions() if one.end == 200}, "all again")
            assert await asyncio.to_thread(run.drain) == 130  # a worker that drains finishes the sessions it holds
            played = sessions()

    assert {(one.end, one.reason) for one in over} == {
        (410, "this session is over: its worker is gone; the sample is made again, as another session")
    }
    for lost in over:
        assert len(lost.said) == 1
        again = [one for one in played if one.sample == lost.sample and one is not lost]
        assert [one.said[0] for one in again] == lost.said, "found again, and not sampled anew"
        assert [one.end for one in again] == [200]
    ended = Counter(one.sample for one in played if one.end == 200)
    twice = {sample for sample, count in ended.items() if count > 1}
    assert {group for group, _ in twice} <= {group for group, _ in (one.sample for one in over)}, "with their group"
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"], found["failed"]) == (0, 0, 0, 0)


async def saved_samples(run: RunProcess) -> set[Sample]:
    """Return the samples with a finished call whose tokens are on the bus."""
    bus = await registry.observe(run.config(), token=run.token)
    try:
        saved = (await bus.states(SEGMENTS)).values()
    finally:
        await bus.close()
    return {(segment.group_id, call.index) for segment in saved for call in segment.calls if call.finish_reason}


async def worker_pid(run: RunProcess) -> int:
    bus = await registry.observe(run.config(), token=run.token)
    try:
        return next(beat.pid for beat in (await bus.states(ACTORS)).values() if beat.role == WORKER)
    finally:
        await bus.close()
