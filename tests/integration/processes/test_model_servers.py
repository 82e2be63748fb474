"""Servers of frozen models as processes of a run: they are started, found by name, and restarted when they die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.adapters import registry
from asyncrl.messages.topics import ACTORS
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = pytest.mark.slow

JUDGE = (
    'servers.judge={kind="tests.harness.stub_server:StubServer", path="model"}',
    "reward.kind=llm_judge",
    'reward.options={server="judge", retries=0}',
)


@pytest.fixture
def run(tmp_path: Path, forks: ForkServer) -> Iterator[RunProcess]:
    one = RunProcess(tmp_path / "here", *JUDGE, name="judged", forks=forks)
    yield one
    one.kill()


async def test_a_judge_that_is_killed_is_restarted_and_no_group_is_lost_or_fails(run: RunProcess) -> None:
    run.start()
    async with run.heard():
        await run.until(lambda: run.steps > 2, "steps of judged answers")
        os.kill(await pid_of(run, "judge"), signal.SIGKILL)
        await run.until(lambda: "judge ended with signal SIGKILL" in run.said, "its end")
        at = run.steps
        await run.until(lambda: run.steps > at + 6, "steps of answers that the next judge has graded")
        assert "restart 1 of 3" in run.said
        assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)
    assert ", 0 failed;" in run.said


async def pid_of(run: RunProcess, name: str) -> int:
    bus = await registry.observe(run.config(), token=run.token)
    try:
        return (await bus.states(ACTORS))[name].pid
    finally:
        await bus.close()
