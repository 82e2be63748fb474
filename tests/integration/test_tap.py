"""`asyncrl tap` shows the messages of a topic without changing anything."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.cli import tap
from asyncrl.errors import Forbidden
from asyncrl.messages import Event, Progress, StepMetrics
from asyncrl.messages.topics import ACTORS, EVENTS, PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness import buses
from tests.harness.command import asyncrl
from tests.harness.roles import Server, connected


async def test_new_entries_of_a_log_are_shown_and_older_ones_are_not(bus_factory: Any) -> None:
    bus, onlooker = await bus_factory(), await bus_factory()
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    async with contextlib.aclosing(tap.flow(onlooker, TRAJECTORIES)) as flowing:
        waiting = asyncio.ensure_future(anext(flowing))
        while not waiting.done():  # it reads from the end of the log at the time it starts
            number = await bus.last_sequence(TRAJECTORIES)
            await bus.publish(TRAJECTORIES, buses.group(number), key=str(number))
            await asyncio.wait((waiting,), timeout=0.1)
        key, message, problem = waiting.result()
    assert (message.group_id, problem) == (int(key), "") and message.group_id > 0
    assert await bus.depth(TRAJECTORIES) == await bus.last_sequence(TRAJECTORIES)


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tap.add_arguments(parser)
    return parser.parse_args(arguments)


async def test_what_is_published_once_it_listens_is_printed_at_once(
    bus_factory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first output is the event: messages published after it are all shown, and no timer is involved."""
    bus, onlooker = await bus_factory(), await bus_factory()
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    listens, said = asyncio.Event(), io.StringIO()
    said.flush = listens.set  # type: ignore[method-assign]
    with contextlib.redirect_stderr(said):
        showing = asyncio.create_task(tap._show(onlooker, TRAJECTORIES, asked("run", "trajectories", "--limit", "1")))
        await listens.wait()
    await bus.publish(TRAJECTORIES, buses.group(1), key="1")
    await showing
    assert said.getvalue().startswith("asyncrl tap: trajectories had 1 messages so far")
    (line,) = capsys.readouterr().out.splitlines()
    assert " 1   group_id 1" in line


async def test_it_sees_a_run_with_an_observers_password_and_can_change_nothing(tmp_path: Path) -> None:
    """On a server with roles, the command's connection may neither publish, take, remove nor set anything."""
    server = Server(tmp_path / "server")
    try:
        async with connected(server, "learner") as learner:
            await learner.publish(PROMPTS, buses.prompt(0), key="0")
            await learner.publish(TRAJECTORIES, buses.group(0), key="0")
            await learner.put(ACTORS, buses.heartbeat("w0"), key="w0")
            run = config.only_overrides(
                [
                    f"bus.url=nats://127.0.0.1:{server.port}",
                    f"bus.credentials={server.directory}/mine/{{role}}",
                    "run.name=mine",
                ]
            )
            for role in ("learner", "operator", "workers/w0"):  # only the observer's password is available
                (server.directory / "mine" / role).unlink()
            for topic in (PROMPTS, ACTORS):
                await tap._tap(run, topic, asked(str(tmp_path), topic.name, "--limit", "1"))
            bus = await registry.observe(run, token="")
            try:
                for call in (
                    bus.publish(TRAJECTORIES, buses.group(1), key="1"),
                    bus.publish(PROMPTS, buses.prompt(1), key="1"),
                    bus.put(PROGRESS, buses.progress(9)),
                    bus.put(ACTORS, buses.heartbeat("w1"), key="w1"),
                    bus.forget(ACTORS, key="w0"),
                    bus.trim(TRAJECTORIES, through=1),
                ):
                    with pytest.raises(Forbidden):
                        await call
            finally:
                await bus.close()
            assert (await learner.depth(PROMPTS), await learner.depth(TRAJECTORIES)) == (1, 1)
            assert list(await learner.states(ACTORS)) == ["w0"]
    finally:
        server.close()


async def test_a_state_is_shown_as_it_is_and_when_it_changes(bus_factory: Any) -> None:
    bus, onlooker = await bus_factory(), await bus_factory()
    await bus.put(PROGRESS, buses.progress(1))
    async with contextlib.aclosing(tap.flow(onlooker, PROGRESS)) as flowing:
        assert (await anext(flowing))[1].step == 1
        await bus.put(PROGRESS, buses.progress(1))
        await bus.put(PROGRESS, buses.progress(2))
        assert (await anext(flowing))[1].step == 2
        await bus.forget(PROGRESS, key="")
        assert await anext(flowing) == ("", None, "removed")


async def test_of_work_the_counts_are_shown_and_nothing_is_taken(bus_factory: Any) -> None:
    bus, onlooker = await bus_factory(), await bus_factory()
    await bus.publish(PROMPTS, buses.prompt(0), key="0")
    async with contextlib.aclosing(tap.flow(onlooker, PROMPTS)) as flowing:
        assert await anext(flowing) == ("", {"stored": 1, "published": 1}, "")
        await bus.publish(PROMPTS, buses.prompt(1), key="1")
        assert await anext(flowing) == ("", {"stored": 2, "published": 2}, "")
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        assert delivery.attempt == 1


async def test_it_ends_when_the_server_of_asyncrl_run_is_gone(tmp_path: Path) -> None:
    """A resumed run has a new server, of which a client of the old server is not notified."""
    run = config.only_overrides([f"run.directory={tmp_path}", "run.name=r"])
    server = tmp_path / "r" / "bus.json"
    server.parent.mkdir()
    for change in (server.unlink, lambda: server.write_text('{"url": "nats://127.0.0.1:2", "token": "b"}')):
        server.write_text('{"url": "nats://127.0.0.1:1", "token": "a"}')
        waiting = asyncio.ensure_future(tap.until_over(run))
        await asyncio.wait((waiting,), timeout=0.01)
        assert not waiting.done()
        change()
        await waiting


def test_a_line_cannot_move_the_cursor_and_has_an_end() -> None:
    event = Event(kind="failed", actor="w0\x1b[2J", time=0.0, data={"error": "x" * 5000})
    line = tap.as_line("0-failed-3", event, "")
    assert "\x1b" not in line and "actor w0?[2J" in line
    assert line.endswith("characters)") and len(line) < 2100
    assert "... 84 more" in tap.as_line("3", buses.group(3, tokens=100), "")
    assert tap.as_line("x", None, "no message").endswith("x   no message")


def test_json_has_every_field_whole() -> None:
    shown = json.loads(tap.as_json("3", buses.group(3, tokens=100), ""))
    assert len(shown["message"]["trajectories"][0]["tokens"]) == 100
    numbers = json.loads(tap.as_json("", StepMetrics(step=1, numbers={"loss": math.nan}), ""))["message"]["numbers"]
    assert numbers == {"loss": None}
    assert json.loads(tap.as_json("", Progress(incarnation=0, step=3, policy_version=3), ""))["message"]["step"] == 3
    assert EVENTS.name in tap.TOPICS


def test_bad_input_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in {
        ("trajectoris",): "TOPIC 'trajectoris' is unknown; did you mean 'trajectories'?",
        ("events", "--limit", "0"): "--limit 0: must be 1 or more",
        ("events",): "holds no run",
        ("events", "--set", "bus.kind=memory"): "",
    }.items():
        code, _, err = asyncrl("tap", tmp_path, *arguments, capsys=capsys)
        assert code == 2 and text in err and err.count("\n") == 1
    code, _, err = asyncrl("tap", "events", "--set", "bus.kind=memory", "--set", "run.name=r", capsys=capsys)
    assert code == 2 and "is inside the process of `asyncrl run`" in err
