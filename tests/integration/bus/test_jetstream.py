"""Behaviour that needs a real server: restarts, rejections, and the separation of two runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.connection import Connection, Reply
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import BusClosed, BusError, ConfigError
from asyncrl.messages.control import FleetSize
from asyncrl.messages.topics import EVENTS, FLEET, PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness.buses import group, progress, prompt, publish_groups, publish_prompts, taken

Connect = Callable[..., Awaitable[JetStreamBus]]


async def restart(server: EmbeddedServer, *, kill: bool = False) -> None:
    if kill:
        os.kill(server.pid, 9)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


async def raw(server: EmbeddedServer) -> Any:
    return await nats.connect(server.url, token=server.token)


async def test_streams_are_not_reserved_on_the_disk(own_server: EmbeddedServer, connect: Connect) -> None:
    """Several streams have the limit of the log, and only one of them fills: a disk with room for it is enough."""
    free = shutil.disk_usage(own_server.directory).free
    bus = await connect(own_server, max_log_bytes=free // 2)
    assert await bus.publish(TRAJECTORIES, group(0), key="0") is True


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [False, True])
async def test_a_restarted_server_is_transparent(own_server: EmbeddedServer, connect: Connect, kill: bool) -> None:
    """One writer, one reader, one worker and one watcher keep working while the server is restarted twice."""
    # Messages in flight to the worker when the server died are redelivered after ack_seconds.
    sizes = {"max_prompts": 1000, "ack_seconds": 1.0}
    writer, following, worker, watcher = [await connect(own_server, run="r", **sizes) for _ in range(4)]
    total = 60
    half_way = asyncio.Event()
    read: list[int] = []
    worked: list[str] = []
    watched: list[int] = []

    async def write() -> None:
        for number in range(total):
            if number in (total // 3, 2 * total // 3):
                half_way.set()
            assert await writer.publish(TRAJECTORIES, group(number, tokens=2_000), key=str(number)) is True
            assert await writer.publish(PROMPTS, prompt(number), key=str(number)) is True
            await writer.put(PROGRESS, progress(number))

    async def follow() -> None:
        async with following.read(TRAJECTORIES) as records:
            while len(read) < total:
                record = await anext(records)
                read.append(int(record.key))

    async def work() -> None:
        async with worker.consume(PROMPTS) as deliveries:
            while len(set(worked)) < total:
                delivery = await anext(deliveries)
                worked.append(delivery.key)
                await delivery.ack()

    async def watch() -> None:
        async with watcher.watch(PROGRESS) as states:
            while not watched or watched[-1] < total - 1:
                watched.append((await anext(states)).step)

    async def disturb() -> None:
        for _ in range(2):
            await half_way.wait()
            half_way.clear()
            await restart(own_server, kill=kill)

    async with asyncio.timeout(240), asyncio.TaskGroup() as tasks:
        for job in (write, follow, work, watch, disturb):
            tasks.create_task(job())
    assert read == list(range(total))
    assert set(worked) == {str(number) for number in range(total)}
    assert watched == sorted(set(watched))
    assert await writer.depth(PROMPTS) == 0


async def test_calls_wait_while_the_server_is_away(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        await asyncio.to_thread(own_server.stop)
        calls = [
            asyncio.create_task(call)
            for call in (
                bus.publish(TRAJECTORIES, group(1), key="1"),
                bus.put(PROGRESS, progress(5)),
                bus.keys(PROMPTS),
                delivery.ack(),
            )
        ]
        await asyncio.to_thread(own_server.start)
        assert await calls[0] is True
        await asyncio.wait(calls)
    assert await bus.depth(PROMPTS) == 0
    assert (await bus.states(PROGRESS))[""].step == 5


async def test_a_call_that_waits_for_the_server_can_be_cancelled(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    async with bus.consume(PROMPTS), bus.read(TRAJECTORIES), bus.watch(PROGRESS):
        await asyncio.to_thread(own_server.stop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await bus.publish(TRAJECTORIES, group(1), key="1")
    await bus.close()  # leaving and closing do not wait for the server


async def test_a_call_ends_with_the_connection_even_if_that_is_slow_to_close(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server closes its end meanwhile: nats-py waits, and the call once waited for a minute."""
    bus = await connect(own_server)
    await asyncio.to_thread(own_server.stop)
    call = asyncio.create_task(bus.depth(PROMPTS))
    with monkeypatch.context() as slow:
        slow.setattr(bus._connection._client, "close", asyncio.Event().wait)
        closing = asyncio.create_task(bus.close())
        with pytest.raises(BusClosed):
            await call
        closing.cancel()
        await asyncio.wait((closing,))


async def test_messages_held_at_a_restart_are_redelivered(own_server: EmbeddedServer, connect: Connect) -> None:
    bus, other = await connect(own_server, run="r"), await connect(own_server, run="r")
    await publish_prompts(bus, 1, 2)
    async with taken(bus, 2) as (one, _):
        await one.ack()
        await restart(own_server)
        await bus.depth(PROMPTS)  # connected again, so leaving can notify the server
    async with taken(other, 1) as (delivery,):
        assert (delivery.key, delivery.attempt) == ("2", 2)


async def test_ack_counts_when_the_server_forgot_the_delivery(own_server: EmbeddedServer, connect: Connect) -> None:
    """A killed server may have lost its consumer's state; it then leaves such an ack unanswered."""
    bus = await connect(own_server, run="r")
    await publish_prompts(bus, 1, 2)
    async with taken(bus, 1) as (delivery,):
        await asyncio.to_thread(own_server.stop)
        (memory,) = own_server.directory.glob("jetstream/**/asyncrl-r-prompts/obs")
        await asyncio.to_thread(shutil.rmtree, memory)
        await asyncio.to_thread(own_server.start)
        await delivery.ack()
        await delivery.ack()
        assert await bus.keys(PROMPTS) == {"2"}
    async with taken(bus, 1) as (delivery,):
        assert delivery.key == "2"


async def test_a_reader_outlives_its_consumer(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, run="lost-reader")
    client = await raw(nats_server)
    stream = "asyncrl-lost-reader-trajectories"
    async with bus.read(TRAJECTORIES) as records:
        for number in range(1, 4):
            await publish_groups(bus, number)
            assert (await anext(records)).sequence == number
            for consumer in await client.jetstream().consumers_info(stream):
                await client.jetstream().delete_consumer(stream, consumer.name)
    await client.close()


async def test_a_worker_outlives_its_consumer(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, run="lost-worker")
    client = await raw(nats_server)
    async with bus.consume(PROMPTS) as deliveries:
        for number in range(1, 4):
            waiting = asyncio.create_task(anext(deliveries))
            await client.jetstream().delete_consumer("asyncrl-lost-worker-prompts", "workers")
            await publish_prompts(bus, number)
            await (await waiting).ack()
    assert await bus.depth(PROMPTS) == 0
    await client.close()


async def test_log_larger_than_the_read_ahead_is_read_whole(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, max_log_bytes=10**9)
    large = 100_000  # tokens of 9 bytes: 40 groups are 36 MB, more than twice the read-ahead
    for number in range(40):
        await bus.publish(TRAJECTORIES, group(number, tokens=large), key=str(number))
    async with bus.read(TRAJECTORIES) as records:
        assert [int((await anext(records)).key) for _ in range(40)] == list(range(40))


async def test_removed_store_is_an_error_to_an_observer(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner and its workers wait for the store instead: test_deleted_streams.py."""
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._NO_RESPONDER_SECONDS", 0.0)
    run = (await connect(own_server, storage="memory"))._layout.run
    onlooker = await connect(own_server, run=run, access=Credentials(role="operator", token=own_server.token))
    await restart(own_server)  # the memory store is now empty
    with pytest.raises(BusError, match="store"):
        await onlooker.put(FLEET, FleetSize(rollout_workers=1, request=""))
    with pytest.raises(BusError, match="stream not found"):
        await onlooker.depth(PROMPTS)


async def test_a_state_whose_ack_was_lost_is_stored_once(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection repeats the request, but another writer's newer state stays."""
    bus, other = await connect(nats_server, run="repeats"), await connect(nats_server, run="repeats")
    ask, lost = Connection._request_once, [True]

    async def lose_the_first(connection: Connection, subject: str, *arguments: Any, **named: Any) -> Any:
        answer = await ask(connection, subject, *arguments, **named)
        if "progress" not in subject or not lost:
            return answer
        lost.pop()
        await other.put(PROGRESS, progress(2))
        return None

    monkeypatch.setattr(Connection, "_request_once", lose_the_first)
    await bus.put(PROGRESS, progress(1))
    assert not lost
    assert (await bus.states(PROGRESS))[""].step == 2
    assert await bus.last_sequence(PROGRESS) == 2


async def test_closing_the_bus_while_a_consumer_leaves_ends_all_tasks(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    """The task that leaves was cancelled, and nobody takes what had arrived: the client would wait for that forever."""
    before = asyncio.all_tasks()
    bus = await connect(nats_server)
    connection, is_taken = bus._connection, asyncio.Event()

    async def take(message: Any) -> None:
        is_taken.set()
        await asyncio.Event().wait()

    subject = connection.inbox()
    subscription = await connection.subscribe(subject, take)
    for _ in range(2):
        await connection.send(subject, b"", reply="")
    await is_taken.wait()
    leaving = asyncio.create_task(connection.unsubscribe(subscription, drain=True))
    while not connection._leaving:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    await bus.close()
    assert not connection._leaving
    while asyncio.all_tasks() != before:
        await asyncio.sleep(0.01)


async def test_connection_survives_a_consumer_that_is_cancelled_twice_while_leaving(
    connect: Connect, nats_server: EmbeddedServer
) -> None:
    """As when a run is finished and the supervisor stops its actors at the same moment."""
    bus = await connect(nats_server)

    async def work() -> None:
        async with bus.consume(PROMPTS) as deliveries:
            entered.set()
            await anext(deliveries)

    for _ in range(5):
        entered = asyncio.Event()
        task = asyncio.create_task(work())
        await entered.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            assert await bus.depth(PROMPTS) == 0


# -- two runs ----------------------------------------------------------------------------------------------------------


async def test_a_second_run_on_the_same_server_sees_nothing(nats_server: EmbeddedServer, connect: Connect) -> None:
    one, other = await connect(nats_server, run="one"), await connect(nats_server, run="one-more")
    await publish_prompts(one, 1)
    await publish_groups(one, 1)
    await one.put(PROGRESS, progress(1))
    for topic in (PROMPTS, TRAJECTORIES):
        assert await other.depth(topic) == 0
        assert await other.keys(topic) == set()
    assert await other.states(PROGRESS) == {}
    assert await other.publish(PROMPTS, prompt(1), key="1") is True


async def test_a_run_is_found_again_and_takes_new_sizes(nats_server: EmbeddedServer, connect: Connect) -> None:
    small = await connect(nats_server, run="grows", max_prompts=1)
    await publish_prompts(small, 1)
    large = await connect(nats_server, run="grows", max_prompts=3, max_log_bytes=2**22, ack_seconds=9.0)
    await publish_prompts(large, 2, 3)
    assert await large.depth(PROMPTS) == 3


async def test_another_storage_for_the_same_run_is_a_config_error(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    await connect(nats_server, run="settled", storage="file")
    with pytest.raises(ConfigError, match=r"settings it had \(bus.store, bus.replicas\) or choose another") as error:
        await connect(nats_server, run="settled", storage="memory")
    assert "rm" not in str(error.value).split()  # the message does not advise removing a log


@pytest.mark.parametrize("code", [10004, 10008, 10009])
async def test_leaderless_jetstream_is_retried_and_no_config_error(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The launcher restarts processes that ended with exit code 1. The real case is
    tests/integration/cluster/test_nats_cluster.py."""

    async def leaderless(*_: Any, **__: Any) -> Reply:
        return Reply(json.dumps({"error": {"err_code": code, "description": "unavailable"}}).encode(), {}, False)

    monkeypatch.setattr("asyncrl.bus.jetstream.connection._PATIENCE_SECONDS", 0.0)
    bus = await connect(nats_server, run="leaderless")
    bus._streams.known.clear()
    monkeypatch.setattr(Connection, "request", leaderless)
    with pytest.raises(BusError, match="no quorum: start the other servers of the cluster") as making:
        await bus._stream(TRAJECTORIES)
    with pytest.raises(BusError, match="no quorum: start the other servers of the cluster") as opening:
        await connect(nats_server, run="leaderless")
    assert (making.value.exit_code, opening.value.exit_code) == (1, 1)


async def test_worker_of_a_missing_run_lists_the_runs_once_and_waits(
    own_server: EmbeddedServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    await connect(own_server, run="mine")
    worker = Credentials(role="rollout-worker", token=own_server.token)
    joining = asyncio.create_task(connect(own_server, run="mien", access=worker))
    while not caplog.messages:
        await asyncio.sleep(0.05)
    await asyncio.wait((joining,), timeout=2.0)  # time for the other streams to report the same
    assert not joining.done()
    (line,) = caplog.messages
    assert line.endswith("no run 'mien' there yet; waiting for its learner; runs there: mine")
    await connect(own_server, run="mien")  # the learner
    await joining


async def test_undecodable_bytes_are_a_problem_and_no_exception(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, run="garbage")
    client = await raw(nats_server)
    for topic in ("prompts", "trajectories"):
        await client.jetstream().publish(f"asyncrl.garbage.{topic}.k", b"\xc1 not msgpack")
    async with bus.consume(PROMPTS) as deliveries, bus.read(TRAJECTORIES) as records:
        for item in (await anext(deliveries), await anext(records)):
            assert (item.key, item.message) == ("k", None)
            assert item.problem
    await client.close()


async def test_an_observer_reads_what_is_left_of_a_run(own_server: EmbeddedServer, connect: Connect) -> None:
    """Existing streams are read, and a missing one is named."""
    learner = await connect(own_server, run="old")
    await learner.publish(TRAJECTORIES, group(3), key="3")
    client = await raw(own_server)
    await client.jetstream().delete_stream(await learner._stream(EVENTS))
    await client.close()
    onlooker = await connect(own_server, run="old", access=Credentials(role="observer", token=own_server.token))
    async with onlooker.read(TRAJECTORIES) as records:
        assert (await anext(records)).key == "3"
    with pytest.raises(ConfigError, match="run 'old' has no .*: somebody deleted the stream"):
        await onlooker.last_sequence(EVENTS)
    with pytest.raises(ConfigError, match="no run 'other' there; set run.name to one of: old"):
        await connect(own_server, run="other", access=Credentials(role="observer", token=own_server.token))
