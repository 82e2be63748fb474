"""Fleets of real processes on a real nats-server: they grow and shrink, workers join and leave, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.adapters import registry
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import WORKER
from asyncrl.messages.topics import ACTORS
from tests.harness.forked import ForkServer
from tests.harness.roles import Server
from tests.harness.run_process import RunProcess, within

pytestmark = pytest.mark.slow

Make = Callable[..., RunProcess]


@pytest.fixture
def make(tmp_path: Path, forks: ForkServer) -> Iterator[Make]:
    """``make(NAME, ...)``: a run that is not started yet; it is killed after the test."""
    made: list[RunProcess] = []

    def one(name: str = "fleet", *overrides: str, folder: str = "here", **more: str) -> RunProcess:
        made.append(RunProcess(tmp_path / folder, *overrides, name=name, forks=forks, **more))
        return made[-1]

    yield one
    for run in made:
        run.kill()


async def test_fleet_grows_and_shrinks_and_keeps_its_size_when_resumed(make: Make) -> None:
    run = make()
    run.start()
    async with run.heard():
        await run.until(lambda: run.event("first_trained", "w0"), "a step")
        code, said = await asyncio.to_thread(run.scale, 3)
        assert code == 0
        assert said.startswith("run fleet: waiting for ")
        assert "run fleet: 3 rollout workers after" in said
        await run.until(lambda: run.event("first_trained", "w1") and run.event("first_trained", "w2"), "all three")
        assert "1 -> 3 rollout workers: + w1, w2" in run.said

        assert (await asyncio.to_thread(run.scale, 1))[0] == 0
        assert "3 -> 1 rollout workers: - w1, w2" in run.said
        assert "w1 has left" in run.said and "w2 has left" in run.said
        assert (await asyncio.to_thread(run.scale, 0))[0] == 0
        assert (await asyncio.to_thread(run.scale, 2))[0] == 0
        assert "restart 1 of" not in run.said
        assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)

    resumed = time.time()  # the event log also has workers that joined before this time
    run.start("--resume")
    async with run.heard():
        await run.until(lambda: "rollout workers: 2, the last size set by `asyncrl scale`" in run.said, "its size")
        await run.until(lambda: sum(e.kind == "joined" and e.time > resumed for e in run.events) >= 2, "both workers")
        assert await asyncio.to_thread(run.drain) == 130
    assert run.audit()["code"] == 0


async def test_fleet_grows_by_itself_while_the_learner_waits(make: Make) -> None:
    """Answers have 40 tokens, so the engine is the bottleneck. A resumed run keeps the size that it chose."""
    engine = 'engine.options={threads=1, step_seconds=0.005, meter="meters"}'
    run = make("fleet", "rollout.most_workers=2", "rollout.max_new_tokens=40", "rollout.ignore_eos=true", engine)
    run.start()
    async with run.heard():
        await run.until(lambda: run.event("first_trained", "w1"), "the second worker")
        assert "rollout.most_workers: 1 -> 2 rollout workers: in 10 steps the learner was idle for" in run.said
        assert [one.data["to"] for one in run.events if one.kind == "resized"] == [2]
        assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)
    run.start("--resume")
    async with run.heard():
        await run.until(lambda: "rollout workers: 2, the last size set by" in run.said, "its size")
        assert await asyncio.to_thread(run.drain) == 130


async def test_worker_joins_and_leaves_a_run(make: Make, tmp_path: Path) -> None:
    run = make()
    run.start()
    away = tmp_path / "away"
    away.mkdir()
    async with run.heard():
        await run.until(lambda: run.event("first_trained", "w0"), "a step")
        for name, number in (("polite", signal.SIGTERM), ("w0", signal.SIGKILL)):  # the run also has a worker w0
            worker = run.join(name, folder=away)
            try:
                await run.until(lambda name=name: its_name(run, name), f"something of {name}")
                assert its_name(run, name) in await beats(run)
                worker.send_signal(number)
                assert await asyncio.to_thread(worker.wait, 60) == (0 if number == signal.SIGTERM else -9)
            finally:
                worker.kill()
                worker.wait()
        assert {path.name for path in (away / "runs" / "fleet").iterdir()} == {"logs"}
        assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)


async def test_refuses_a_second_run_of_the_same_name(make: Make, own_server: EmbeddedServer, tmp_path: Path) -> None:
    """Two runs start at the same moment from different folders: only one becomes the run.

    A worker of it that is killed at any time comes back under its own name.
    """
    where = {"url": own_server.url, "token": own_server.token}
    runs = [make("same", folder=folder, **where) for folder in ("here", "there")]
    for run in runs:
        run.start()
    async with within("one of the two is refused"):
        while not (refused := [run for run in runs if run.code is not None]):
            await asyncio.sleep(0.05)
    (second,), (first,) = refused, [run for run in runs if run not in refused]
    assert second.code == 2
    assert "`asyncrl run` of 'same' is up on this bus: process" in second.said
    assert len(second.said.splitlines()) == 1
    async with first.heard():
        await first.until(lambda: first.event("first_trained", "w0"), "a step")
        beat = next(beat for beat in (await beats(first)).values() if beat.role == WORKER)
        os.kill(beat.pid, signal.SIGKILL)
        await first.until(lambda: len([one for one in first.events if one.kind == "joined"]) == 2, "w0 again")
        assert await asyncio.to_thread(first.drain) == 130
    assert first.audit()["code"] == 0


def its_name(run: RunProcess, label: str) -> str:
    """Return the name of the worker that joined as ``label``, once a group of it is trained."""
    names = {str(one.data.get("worker")) for one in run.events if one.kind == "first_trained"}
    return label if label in names else ""


async def beats(run: RunProcess) -> dict[str, Heartbeat]:
    bus = await registry.observe(run.config(), token=run.token)
    try:
        return await bus.states(ACTORS)
    finally:
        await bus.close()


async def test_two_runs_share_a_server(make: Make, own_server: EmbeddedServer) -> None:
    """Even if their names have a common prefix and they use the same model, prompts and folder."""
    where = {"url": own_server.url, "token": own_server.token}
    runs = [make(name, **where) for name in ("one", "one-state")]
    for run in runs:
        run.start()
    async with runs[0].heard(), runs[1].heard():
        for run in runs:
            await run.until(lambda run=run: run.event("first_trained", "w0"), "a step")
        second = make("one", folder="elsewhere", **where)
        second.start("--resume")
        assert await asyncio.to_thread(second.wait) == 2
        assert "run.name: `asyncrl run` of 'one' is up on this bus" in second.said
        assert "w0" not in second.said
        for run in runs:
            assert await asyncio.to_thread(run.drain) == 130
    for run in runs:
        run.start("--resume", "--set", f"run.steps={run.steps + 4}")
    async with runs[0].heard(), runs[1].heard():
        for run in runs:
            assert await asyncio.to_thread(run.wait) == 0
        async with within("both workers have joined twice"):
            for run in runs:
                while len([event for event in run.events if event.kind == "joined"]) < 2:
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # further events would be of the other run
        for run in runs:
            assert {event.actor for event in run.events} == {"w0", "learner"}
            assert len([event for event in run.events if event.kind == "joined"]) == 2
    again = make("one", folder="elsewhere", **where)
    again.start()
    assert await asyncio.to_thread(again.wait) == 2
    assert "'one' already has a run in" in again.said
    again.start("--resume")
    assert await asyncio.to_thread(again.wait) == 2
    assert "has no checkpoint of run 'one'" in again.said
    for run in runs:
        found = run.audit()
        assert (found["code"], found["lost"], found["duplicated"], found["steps"]) == (0, 0, 0, run.steps)


async def test_operator_may_scale_on_a_server_with_roles(make: Make, tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    try:
        run = make("mine", f"bus.credentials={server.directory}/mine/{{role}}", url=f"nats://127.0.0.1:{server.port}")
        run.start()
        async with run.heard():
            await run.until(lambda: run.event("first_trained", "w0"), "a step")
            for name in ("learner", "workers"):  # neither is needed to scale
                (server.directory / "mine" / name).rename(server.directory / "mine" / f"{name}.away")
            assert (await asyncio.to_thread(run.scale, 0))[0] == 0
            assert await asyncio.to_thread(run.drain) == 130
    finally:
        server.close()
