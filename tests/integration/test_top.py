"""`asyncrl top` shows what a run does now, without changing anything."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl import config
from asyncrl.adapters.bus_file import BUS_FILE
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.cli import top
from asyncrl.errors import ConfigError
from asyncrl.messages import Heartbeat, StepMetrics, Wait
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.messages.topics import ACTORS, METRICS
from asyncrl.policies.health.faults import ActorStatus, Finding, Observation
from tests.conftest import BUS_SIZES

METRICS_OF_STEP_7 = StepMetrics(
    step=7,
    numbers={
        "reward/mean": 0.75,
        "weights/version": 7.0,
        "learner/tokens_per_second": 12345.0,
        "learner/incarnation": 2.0,
    },
    staleness=(10, 30),
)

Show = Callable[..., str]


def worker(name: str, *, version: int, seconds: float = 0.0) -> ActorStatus:
    wait = Wait(what="prompts", on=LEARNER, seconds=4.0)
    numbers = {"rollout/tokens_per_second": 1500.0, "rollout/running": 32.0}
    beat = Heartbeat(actor=name, role=WORKER, policy_version=version, waits=(wait,), numbers=numbers)
    return ActorStatus(beat=beat, seconds=seconds)


def shown(view: top.RunView, *, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(top.screen(view, width=width))
    return out.getvalue()


def view(*workers: ActorStatus, metrics: StepMetrics | None = METRICS_OF_STEP_7) -> top.RunView:
    actors = {seen.beat.actor: seen for seen in workers}
    return top.RunView(where="run r", observation=Observation(actors=actors, listened=9.0), metrics=metrics)


def test_it_shows_the_newest_step_under_the_names_of_the_schema() -> None:
    lines = shown(view()).splitlines()
    assert lines[0].split() == ["run", "r", "step", "7", "version", "7", "incarnation", "2"]
    assert any("reward" in line and "mean 0.750" in line for line in lines)
    assert any("learner" in line and "tok/s 12,345" in line for line in lines)


def test_the_histogram_of_staleness_has_a_bar_for_each_age() -> None:
    lines = [line for line in shown(view()).splitlines() if "█" in line]
    assert [line.split()[-1] for line in lines] == ["25.0%", "75.0%"]
    assert lines[0].count("█") * 3 == pytest.approx(lines[1].count("█"), abs=2)


def test_every_worker_says_how_far_behind_it_is_and_what_it_waits_for() -> None:
    (line,) = [line for line in shown(view(worker("w0", version=5))).splitlines() if "w0" in line]
    assert line.split() == ["w0", "1,500", "32", "0", "0%", "5", "2", "0.000", "prompts", "(4", "s)"]


@pytest.mark.parametrize(
    ("width", "columns", "row"),
    [
        (40, "worker tok/s lag waits for", "w0 1,500 3 prompts (4 s)"),
        (60, "worker tok/s running idle version lag waits for", "w0 1,500 32 0% 4 3 prompts (4 s)"),
    ],
)
def test_a_narrow_screen_leaves_out_whole_columns_and_says_so(width: int, columns: str, row: str) -> None:
    lines = [" ".join(line.split()) for line in shown(view(worker("w0", version=4)), width=width).splitlines()]
    assert columns in lines
    assert row in lines
    assert any(line.startswith("too narrow for: pause s, queued") for line in lines)
    assert not any("…" in line for line in lines)
    assert "too narrow" not in shown(view(worker("w0", version=4)))


def test_a_silent_worker_is_said_to_be_silent() -> None:
    assert "not heard for 40 s" in shown(view(worker("w0", version=7, seconds=40.0)))


def test_of_a_large_fleet_those_that_are_behind_are_shown() -> None:
    fleet = [worker(f"w{number:03d}", version=number) for number in range(100)]
    text = shown(view(*fleet))
    assert "w000" in text
    assert f"w{top.MOST_ROWS:03d}" not in text
    assert f"and {100 - top.MOST_ROWS} more" in text


def test_of_a_large_fleet_those_that_are_silent_are_shown() -> None:
    fleet = [worker(f"w{number:03d}", version=number) for number in range(100)]
    assert "w100" in shown(view(*fleet, worker("w100", version=100, seconds=40.0)))


def test_what_a_worker_says_does_nothing_to_the_terminal() -> None:
    wait = Wait(what="\x1b]0;mine\x07 [red]prompts", seconds=4.0)
    beat = Heartbeat(actor="w", role=WORKER, waits=(wait,))
    finding = Finding(fault="engine", actor="w", cause="\x1b[2J", remedy="see its log", seconds=7.0)
    found = dataclasses.replace(view(ActorStatus(beat=beat)), findings=[finding])
    assert "[red]prompts" in shown(found)
    assert not {"\x1b", "\x07"} & set(shown(found))


def test_before_the_first_step_it_says_so() -> None:
    assert "no step is trained yet" in shown(view(metrics=None))


@pytest.fixture
def show(nats_server: EmbeddedServer) -> Show:
    """``show(run)``: the text that it prints for a run on the session's server, or for one at another ``url``."""

    def call(run: str, *, url: str = "", encoding: str = "utf-8") -> str:
        settings = config.only_overrides(
            [f"bus.url={url or nats_server.url}", f"run.name={run}", "bus.connect_seconds=3.0"]
        )
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        top.top(settings, token=nats_server.token, once=True, console=Console(file=out, width=120))
        out.seek(0)
        return out.read()

    return call


@pytest.fixture
def run(nats_server: EmbeddedServer) -> str:
    name = f"run-{uuid.uuid4().hex[:8]}"

    async def make() -> None:
        sizes: dict[str, Any] = BUS_SIZES
        bus = await JetStreamBus.connect(nats_server.url, run=name, token=nats_server.token, storage="file", **sizes)
        await bus.put(METRICS, METRICS_OF_STEP_7)
        await bus.put(ACTORS, worker("w0", version=6).beat, key="w0")
        await bus.close()

    asyncio.run(make())
    return name


def test_it_reads_everything_from_the_bus(show: Show, run: str) -> None:
    text = show(run)
    assert f"run {run} on nats://" in text
    assert "mean 0.750" in text
    assert "w0" in text


def test_a_terminal_without_blocks_gets_other_bars(show: Show, run: str) -> None:
    assert " 1 ########" in show(run, encoding="ascii")


def test_it_goes_on_where_a_run_comes_back(nats_server: EmbeddedServer, run: str, tmp_path: Path) -> None:
    """`asyncrl run` is killed and restarted; its server then has another port and another token."""

    def is_up(url: str, token: str) -> None:
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / BUS_FILE).write_text(json.dumps({"url": url, "token": token, "pid": 1}))

    async def look() -> tuple[top.RunView, top.RunView]:
        is_up("nats://127.0.0.1:1", "old")
        observer = top.RunObserver(config.only_overrides([f"run.directory={tmp_path}", f"run.name={run}"]), token="")
        try:
            away = await observer.poll()
            is_up(nats_server.url, nats_server.token)
            return away, await observer.poll()
        finally:
            await observer.close()

    away, back = asyncio.run(look())
    assert away.metrics is None
    assert back.metrics == METRICS_OF_STEP_7
    assert nats_server.url in back.where


def test_who_is_silent_waits_for_nothing() -> None:
    beat = Heartbeat(actor="learner", role=LEARNER, waits=(Wait(what="a training step", seconds=4.0),))
    (line,) = [
        one
        for one in shown(view(ActorStatus(beat=beat, seconds=40.0))).splitlines()
        if "learner" in one and "heard" in one
    ]
    assert line.split() == ["learner", "not", "heard", "for", "40", "s"]


def test_a_run_that_is_not_there_is_a_mistake_that_names_those_that_are(show: Show, run: str) -> None:
    with pytest.raises(ConfigError, match=rf"no run 'nowhere' there; set run.name to one of: .*{run}"):
        show("nowhere")


def test_a_wrong_token_is_a_mistake_of_the_user(nats_server: EmbeddedServer, run: str) -> None:
    settings = config.only_overrides([f"bus.url={nats_server.url}", f"run.name={run}"])
    with pytest.raises(ConfigError, match="refuses the token or password"):
        top.top(settings, token="wrong", once=True, console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_bus_that_is_not_there_is_said(show: Show) -> None:
    assert "nats-server has not answered" in show("any", url="nats://127.0.0.1:1")


def test_the_numbers_to_watch_come_first_with_what_is_normal() -> None:
    lines = shown(view(), width=140).splitlines()
    assert lines[1].split()[:2] == ["reward", "0.75"]
    assert lines[1].endswith("rises, or stays near its best")
