"""The run's own nats-server is restarted when it ends, and when its store broke on a full disk that has room again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.launch.processes import process_manager
from asyncrl.messages.topics import PROMPTS
from tests.harness.buses import prompt
from tests.harness.faults.injections import full_disk
from tests.harness.fleet import Launcher, manager_of


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_manager, "SERVER_POLL_SECONDS", 0.05)


async def test_server_that_ends_is_restarted_on_its_port_and_store(
    own_server: EmbeddedServer, connect: Callable[..., Awaitable[JetStreamBus]], capsys: pytest.CaptureFixture[str]
) -> None:
    bus = await connect(own_server)
    await bus.publish(PROMPTS, prompt(0), key="0")
    keeping = asyncio.create_task(manager_of(Launcher(), server=own_server)._keep_server_up(own_server))
    pid, url = own_server.pid, own_server.url
    os.kill(pid, signal.SIGKILL)
    while own_server.pid in (0, pid):
        await asyncio.sleep(0.01)
    await bus.publish(PROMPTS, prompt(1), key="1")
    assert (await bus.depth(PROMPTS), own_server.url) == (2, url)
    assert "nats-server ended; it is restarted" in capsys.readouterr().err
    keeping.cancel()


async def test_server_with_a_broken_store_is_restarted_at_no_cost_once_there_is_room(
    own_server: EmbeddedServer, connect: Callable[..., Awaitable[JetStreamBus]], capsys: pytest.CaptureFixture[str]
) -> None:
    bus = await connect(own_server)
    manager = manager_of(Launcher(), "run.restarts=0", server=own_server)
    pid = own_server.pid
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(manager._keep_server_up(own_server))
        waiting = [group.create_task(bus.publish(PROMPTS, prompt(0), key="0"))]
        while own_server.pid == pid:
            with full_disk(pid):  # it cannot even write to its log
                await answered_nothing(group, bus, waiting)
            await answered_nothing(group, bus, waiting)
        while not own_server.pid:
            await asyncio.sleep(0.01)
        await bus.publish(PROMPTS, prompt(1), key="1")
        for one in (keeping, *waiting):
            one.cancel()
    assert "nats-server had no room to store; it is restarted" in capsys.readouterr().err


async def answered_nothing(group: asyncio.TaskGroup, bus: JetStreamBus, waiting: list[asyncio.Task[None]]) -> None:
    """Publish a prompt that may never be stored."""
    publishing = bus.publish(PROMPTS, prompt(0), key="0")
    waiting.append(group.create_task(publishing))
    await asyncio.wait(waiting[-1:], timeout=0.3)
