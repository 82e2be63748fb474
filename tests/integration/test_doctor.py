"""`asyncrl doctor` finds its run, reports what is wrong, and changes nothing."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl import config
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.cli import doctor
from asyncrl.errors import ConfigError
from asyncrl.messages import Heartbeat, Progress, Wait
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.messages.topics import ACTORS, PROGRESS, PROMPTS
from tests.conftest import BUS_SIZES

Examine = Callable[..., int]


@pytest.fixture
def examine(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """``examine(run, as_json=...)``: the exit code of a doctor that listens for one look only."""
    monkeypatch.setattr(doctor, "LISTEN_SECONDS", 0.0)

    def call(run: str, *, url: str = "", as_json: bool = False) -> int:
        overrides = [f"bus.url={url or nats_server.url}", f"run.name={run}"]
        overrides += ["bus.connect_seconds=0.3"] if url else []
        return doctor.examine(config.only_overrides(overrides), token=nats_server.token, as_json=as_json)

    return call


@pytest.fixture
def run(nats_server: EmbeddedServer) -> str:
    """A learner that waits for a worker that does not exist."""
    name = f"run-{uuid.uuid4().hex[:8]}"

    async def make() -> None:
        bus = await _open(nats_server, name)
        wait = Wait(what="trajectories", on=WORKER, seconds=14.0)
        await bus.put(ACTORS, Heartbeat(actor=LEARNER, role=LEARNER, waits=(wait,), host="far"), key=LEARNER)
        await bus.close()

    asyncio.run(make())
    return name


async def _open(server: EmbeddedServer, name: str) -> JetStreamBus:
    sizes: dict[str, Any] = BUS_SIZES
    return await JetStreamBus.connect(server.url, run=name, token=server.token, storage="file", **sizes)


def test_it_says_who_waits_for_what_and_why(examine: Examine, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(run) == 1
    said = capsys.readouterr().out
    assert "waits for: trajectories (14 s)" in said
    assert (
        "no worker: learner waits for trajectories; there is no rollout worker; this costs time, not correctness -> "
        "start one" in said
    )


def test_it_says_the_same_to_programs(examine: Examine, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(run, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["fault"] for one in found["findings"]] == ["no worker"]
    assert found["actors"]["learner"]["waits"][0]["what"] == "trajectories"


def test_a_run_with_nothing_wrong_is_a_success(
    examine: Examine, run: str, nats_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def finish() -> None:
        bus = await _open(nats_server, run)
        await bus.put(PROGRESS, Progress(incarnation=0, step=3, policy_version=3, finished=True))
        await bus.close()

    asyncio.run(finish())
    assert examine(run) == 0
    assert "finished" in (said := capsys.readouterr().out)
    assert "nothing is wrong" in said


def test_a_run_that_is_not_there_is_a_mistake_that_names_those_that_are(examine: Examine, run: str) -> None:
    with pytest.raises(ConfigError, match=rf"no run 'nowhere' there; set run.name to one of: .*{run}"):
        examine("nowhere")


def test_a_wrong_token_is_a_mistake_of_the_user_and_no_stall_of_the_bus(run: str, nats_server: EmbeddedServer) -> None:
    settings = config.only_overrides([f"bus.url={nats_server.url}", f"run.name={run}"])
    with pytest.raises(ConfigError, match="refuses the token or password"):
        doctor.examine(settings, token="wrong", as_json=False)


def test_what_an_actor_says_does_nothing_to_the_terminal(
    examine: Examine, run: str, nats_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def speak() -> None:
        bus = await _open(nats_server, run)
        wait = Wait(what="\x1b]0;mine\x07 prompts", on=LEARNER, seconds=4.0)
        await bus.put(ACTORS, Heartbeat(actor="w0", role=WORKER, waits=(wait,), host="far"), key="w0")
        await bus.close()

    asyncio.run(speak())
    examine(run)
    printed = capsys.readouterr().out
    assert "mine? prompts" in printed
    assert not {"\x1b", "\x07"} & set(printed)


@pytest.mark.slow
def test_a_bus_that_is_not_there_is_a_finding(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "LISTEN_SECONDS", doctor.SILENT_SECONDS)
    assert examine("any", url="nats://127.0.0.1:1") == 1
    assert "bus: nats-server has not answered for" in capsys.readouterr().out


def test_it_makes_and_changes_nothing(examine: Examine, run: str, nats_server: EmbeddedServer) -> None:
    async def state() -> tuple[Any, set[str]]:
        bus = await _open(nats_server, run)
        info = await bus._info(PROMPTS)
        left = set(await bus.states(ACTORS))
        await bus.close()
        return info["config"]["max_msgs"], left

    before = asyncio.run(state())
    examine(run)
    assert asyncio.run(state()) == before == (BUS_SIZES["max_prompts"], {LEARNER})
