"""`asyncrl tap` shows what flows on a topic, and only looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.cli import tap
from asyncrl.messages import Event, Progress, StepMetrics
from asyncrl.messages.topics import EVENTS, PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness import buses
from tests.harness.command import asyncrl


async def test_new_entries_of_a_log_are_shown_and_older_ones_are_not(bus_factory: Any) -> None:
    bus, onlooker = await bus_factory(), await bus_factory()
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    async with contextlib.aclosing(tap.flow(onlooker, TRAJECTORIES)) as flowing:
        waiting = asyncio.ensure_future(anext(flowing))
        while not waiting.done():  # it reads from the end that the log has when it begins
            number = await bus.last_sequence(TRAJECTORIES)
            await bus.publish(TRAJECTORIES, buses.group(number), key=str(number))
            await asyncio.wait((waiting,), timeout=0.1)
        key, message, problem = waiting.result()
    assert (message.group_id, problem) == (int(key), "") and message.group_id > 0
    assert await bus.depth(TRAJECTORIES) == await bus.last_sequence(TRAJECTORIES)


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
    """A resumed run has another one, which nobody is told of who waits for the first."""
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
