"""A nats-server whose store broke on a full disk stores nothing even after space is free, so it is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.launch.processes.child_process import RestartPolicy
from asyncrl.launch.processes.server_restarts import keep_up
from asyncrl.messages.topics import PROMPTS
from tests.harness.buses import prompt
from tests.harness.faults.injections import full_disk


async def test_a_server_that_stores_no_more_is_started_again_once_there_is_room(
    own_server: EmbeddedServer, connect: Callable[..., Awaitable[JetStreamBus]]
) -> None:
    said: list[str] = []
    bus = await connect(own_server)
    pid = own_server.pid
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(keep_up(own_server, restarts=RestartPolicy(3), say=said.append, look_seconds=0.05))
        waiting = [group.create_task(bus.publish(PROMPTS, prompt(0), key="0"))]
        while own_server.pid == pid:
            with full_disk(pid):  # it cannot even write to its log
                await answered_nothing(group, bus, waiting)
            await answered_nothing(group, bus, waiting)
        while not own_server.pid:
            await asyncio.sleep(0.01)
        await bus.publish(PROMPTS, prompt(1), key="1")
        for one in (kept, *waiting):
            one.cancel()
    assert "can store no more (" in said[0]
    assert "stored no more (" in said[1]


async def test_a_full_disk_of_the_server_is_named_once_by_the_launcher(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server cannot write it to its log, which is on the same disk."""
    said: list[str] = []
    looks = asyncio.Queue[bool]()
    room = iter([True, False, False, True, False])

    def has_room() -> bool:
        found = next(room, False)
        loop.call_soon_threadsafe(looks.put_nowait, found)
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(own_server, "has_room", has_room)
    kept = asyncio.create_task(keep_up(own_server, restarts=RestartPolicy(3), say=said.append, look_seconds=0.01))
    for _ in range(7):
        await looks.get()
    kept.cancel()
    assert len(said) == 2
    assert all("the disk of its store is full" in line for line in said)


async def test_a_run_outlives_more_full_disks_of_its_server_than_it_has_restarts(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    full, broken = asyncio.Event(), set[int]()  # pids of servers with a broken store
    monkeypatch.setattr(own_server, "has_room", lambda: not full.is_set())
    monkeypatch.setattr(own_server, "failure", lambda: "no space left" if own_server.pid in broken else "")
    kept = asyncio.create_task(keep_up(own_server, restarts=RestartPolicy(0), say=said.append, look_seconds=0.01))
    for number in range(1, 4):
        broken.add(pid := own_server.pid)
        full.set()
        while sum("the disk of its store is full" in line for line in said) < number:
            await asyncio.sleep(0.01)
        assert own_server.pid == pid  # a restarted server would not come up
        full.clear()
        while own_server.pid in (0, pid):
            await asyncio.sleep(0.01)
        assert not kept.done()
    kept.cancel()
    assert sum("there is room again" in line for line in said) == 3


async def answered_nothing(group: asyncio.TaskGroup, bus: JetStreamBus, waiting: list[asyncio.Task[None]]) -> None:
    """Publish a prompt that may never be stored."""
    publishing = bus.publish(PROMPTS, prompt(0), key="0")
    waiting.append(group.create_task(publishing))
    await asyncio.wait(waiting[-1:], timeout=0.3)
