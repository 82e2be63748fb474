"""Reading the states of a fleet takes one round trip, and leaves no per-worker state on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.bus.jetstream import bus as jetstream
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS, PROGRESS
from tests.harness.buses import progress

Connect = Callable[..., Awaitable[JetStreamBus]]


def beat(name: str) -> Heartbeat:
    return Heartbeat(actor=name, role="rollout-worker", beat=1)


async def test_all_states_are_read_however_many_there_are(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    names = {f"w{number}" for number in range(3 * jetstream._FEW)}
    for name in sorted(names):
        await bus.put(ACTORS, beat(name), key=name)
    await bus.put(ACTORS, beat("w0"), key="w0")
    await bus.forget(ACTORS, key="w1")
    found = await bus.states(ACTORS)
    assert found.keys() == names - {"w1"}
    assert all(beat.actor == name for name, beat in found.items())


async def test_more_states_than_one_order_brings_are_read(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: Any
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.last_per_subject._BATCH", 10)
    bus = await connect(own_server)
    for number in range(30):
        await bus.put(ACTORS, beat(f"w{number}"), key=f"w{number}")
    assert len(await bus.states(ACTORS)) == 30


async def test_a_watch_and_a_sweep_leave_nothing_on_the_server(own_server: EmbeddedServer, connect: Connect) -> None:
    bus: Any = await connect(own_server)
    for number in range(20):
        await bus.put(ACTORS, beat(f"w{number}"), key=f"w{number}")
    await bus.states(ACTORS)
    async with bus.watch(PROGRESS) as states:
        await bus.put(PROGRESS, progress(1))
        assert (await anext(states)).step == 1
        for topic in (ACTORS, PROGRESS):
            while (await bus._info(topic))["state"]["consumer_count"]:  # the server removes a consumer with a delay
                await asyncio.sleep(0.05)


async def test_a_watch_sees_what_it_was_not_told(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: Any
) -> None:
    """A leader that dies may have stored a state without announcing it; here the announcement goes astray."""
    monkeypatch.setattr("asyncrl.bus.jetstream.watch.REFRESH_SECONDS", 0.05)
    monkeypatch.setattr("asyncrl.bus.jetstream.layout.Layout.told", lambda *_: "astray")
    bus = await connect(own_server)
    await bus.put(PROGRESS, progress(1))
    async with bus.watch(PROGRESS) as states:
        assert (await anext(states)).step == 1
        await bus.put(PROGRESS, progress(2))
        assert (await anext(states)).step == 2
