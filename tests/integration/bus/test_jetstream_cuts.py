"""Workers and lease holders that are cut off, silent or blocked lose nothing that others wait for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from tests.harness.buses import Proxy, brief_leases, group, publish_prompts, taken
from tests.harness.faults.injections import stopped

Connect = Callable[..., Awaitable[JetStreamBus]]
SIZES: dict[str, Any] = {"max_prompts": 8, "max_log_bytes": 2**20, "ack_seconds": 30.0, "storage": "file"}


@contextlib.asynccontextmanager
async def closing(bus: JetStreamBus) -> AsyncIterator[JetStreamBus]:
    """For a bus that must not outlive its connection's proxy."""
    try:
        yield bus
    finally:
        await bus.close()


async def test_connections_that_the_server_closes_at_once_are_closed_on_our_side_too(
    nats_server: EmbeddedServer,
) -> None:
    async with Proxy(nats_server.port) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="away", token=nats_server.token, **SIZES)
        async with closing(bus):
            proxy.turns_away = True
            proxy.cut()
            while proxy.num_turned_away < 3:
                await asyncio.sleep(0.01)
            proxy.turns_away = False
            assert await bus.depth(PROMPTS) == 0
        gc.collect()  # an open one would warn


# -- work --------------------------------------------------------------------------------------------------------------


async def test_silent_worker_requests_one_message_and_no_more(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old pull requests, which the server still holds, must not deliver more than it has room for."""
    monkeypatch.setattr("asyncrl.bus.jetstream.consumers.PULL_SILENCE_SECONDS", 0.02)
    bus, other = await connect(nats_server, run="silent"), await connect(nats_server, run="silent")
    async with bus.consume(PROMPTS) as deliveries:
        waiting = asyncio.ensure_future(anext(deliveries))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(waiting)
        await publish_prompts(bus, 1)
        assert (await waiting).attempt == 1
        await publish_prompts(bus, 2, 3)
        async with taken(other, 2) as theirs:
            assert [(delivery.key, delivery.attempt) for delivery in theirs] == [("2", 1), ("3", 1)]


async def test_worker_whose_loop_was_blocked_requests_one_message_and_no_more(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked for longer than the silence limit and the request's lifetime: its timer and the message are ready
    together."""
    monkeypatch.setattr("asyncrl.bus.jetstream.consumers.PULL_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr("asyncrl.bus.jetstream.consumers.PULL_EXPIRES_SECONDS", 0.2)
    bus, other = await connect(nats_server, run="blocked"), await connect(nats_server, run="blocked")
    for number in range(0, 20, 2):
        async with bus.consume(PROMPTS) as deliveries:
            waiting = asyncio.ensure_future(anext(deliveries))
            await bus.depth(PROMPTS)  # by now the pull request is in place
            await publish_prompts(other, number)
            time.sleep(0.1 + number / 100)  # noqa: ASYNC251 - from before the request's end to after it
            ours = await waiting
            await publish_prompts(other, number + 1)
            async with taken(other, 1) as (theirs,):
                assert (ours.key, theirs.key) == (str(number), str(number + 1))
                await ours.ack()
                await theirs.ack()


async def test_worker_that_was_cut_off_requests_one_message_and_no_more(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    """The server survived the cut, and so did the pull request that it holds."""
    other = await connect(nats_server, run="cut")
    async with Proxy(nats_server.port) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="cut", token=nats_server.token, **SIZES)
        async with closing(bus), bus.consume(PROMPTS) as deliveries:
            waiting = asyncio.ensure_future(anext(deliveries))
            for _ in range(3):
                await bus.depth(PROMPTS)
                proxy.cut()
            await bus.depth(PROMPTS)
            await publish_prompts(other, 1)
            ours = await waiting
            await publish_prompts(other, 2)
            async with taken(other, 1) as (theirs,):
                assert {ours.key, theirs.key} == {"1", "2"}
                assert theirs.attempt == 1


# -- a slow connection -------------------------------------------------------------------------------------------------


async def test_slow_link_is_given_time_for_a_large_message(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating the request would send the same bytes again over the slow connection, without end."""
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._ANSWER_SECONDS", 0.2)
    async with Proxy(nats_server.port, bytes_per_second=300_000) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="slow", token=nats_server.token, **SIZES)
        async with closing(bus):
            before = proxy.carried
            async with asyncio.TaskGroup() as tasks:
                for number in range(4):
                    large = group(number, tokens=10_000)
                    tasks.create_task(bus.publish(TRAJECTORIES, large, key=str(number)))
            assert 4 * 90_000 < proxy.carried - before < 1.2 * 4 * 90_000


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_lease_of_a_dead_holder_expires(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief_leases(monkeypatch)
    bus, other = await connect(nats_server, run="dead"), await connect(nats_server, run="dead")
    has_it = False
    async with bus.lease("load", holder="a"):
        await bus.close()
        async with other.lease("load", holder="b"):
            has_it = True
    assert has_it


async def test_holder_that_was_cut_off_does_not_disturb_the_next_one(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brief_leases(monkeypatch, seconds=3.0)
    other, third = [await connect(nats_server, run="cut-lease") for _ in range(2)]
    async with Proxy(nats_server.port) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="cut-lease", token=nats_server.token, **SIZES)
        async with closing(bus), contextlib.AsyncExitStack() as ours:
            await ours.enter_async_context(bus.lease("load", holder="a"))
            proxy.shut()
            async with other.lease("load", holder="b"):
                await proxy.open()
                while "expired while held" not in caplog.text:
                    await bus.depth(PROMPTS)
                await ours.aclose()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1), third.lease("load", holder="c"):
                        pass
            async with third.lease("load", holder="c"):
                pass


async def test_leaving_a_lease_does_not_wait_for_a_server_that_is_away(
    own_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(own_server)
    async with bus.lease("load", holder="a"):
        await asyncio.to_thread(own_server.stop)
    assert not own_server.pid


async def test_closing_the_bus_while_it_reconnects_ends_all_tasks(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client loses a cancellation that arrives as an attempt fails. What it leaves running would keep the process
    alive."""
    tries = asyncio.Event()

    async def refused(*_: object) -> None:
        tries.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    before = asyncio.all_tasks()
    bus = await connect(own_server)
    monkeypatch.setattr(bus._connection._client, "_connect_to_server", refused)
    await asyncio.to_thread(own_server.stop)
    await tries.wait()
    await bus.close()
    while asyncio.all_tasks() != before:
        await asyncio.sleep(0.01)
    assert not own_server.pid


async def taken_by_nobody(message: Any) -> None:
    raise AssertionError(message)


async def test_a_message_that_the_server_sends_after_a_drain_is_heard_and_nothing_is_left(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer chose the inbox before, and the server counts the message as delivered: who ignores it holds it up
    for ack_seconds."""
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._LATE_SECONDS", 0.1)
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: Any) -> None:
        heard.put_nowait(message.data)

    async with Proxy(nats_server.port) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="late", token=nats_server.token, **SIZES)
        async with closing(bus):
            connection = bus._connection
            before = set(connection._client._subs)
            subscription = await connection.subscribe(inbox := connection.inbox(), hear)
            await connection.unsubscribe(subscription, drain=True)
            proxy.say(f"MSG {inbox} {subscription._id} 4\r\nlate\r\n".encode())
            assert await heard.get() == b"late"
            while connection._leaving:
                await asyncio.wait(connection._leaving)
            assert set(connection._client._subs) == before


async def test_connection_survives_a_drain_that_a_frozen_server_did_not_answer(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._DRAIN_SECONDS", 0.01)
    bus = await connect(own_server)
    connection = bus._connection
    subscription = await connection.subscribe(connection.inbox(), taken_by_nobody)
    with stopped(own_server.pid):
        await connection.unsubscribe(subscription, drain=True)
    async with asyncio.timeout(120):
        await connection._client.flush()
        assert (await connection.api("STREAM.NAMES"))["streams"], "it asks and is answered"
