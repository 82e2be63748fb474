"""What a run has on the bus is deleted, or its server comes back with an older store: the run ends in one line that
names it, and a resumed run rebuilds it. On a real server."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import history
from asyncrl.actors.learner import learner as learner_module
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.kv import Lease
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import BusError, BusLost
from asyncrl.messages.topics import ACTORS, ALL, PROGRESS, PROMPTS, TRAJECTORIES
from asyncrl.policies.audit.entries import present
from tests.harness.buses import first, group, heartbeat, progress, prompt, publish_groups, publish_prompts, taken
from tests.harness.fakes import Engine, Loop, run_worker, until, worker
from tests.integration.bus.test_jetstream_forgets import going_back

Connect = Callable[..., Awaitable[JetStreamBus]]

LAYOUT = Layout(run="RUN", max_prompts=8, max_log_bytes=2**20, ack_seconds=1.0, storage="file")
STREAMS = sorted({LAYOUT.stream(topic) for topic in (*ALL, Lease.TOPIC)})
EVERYTHING = [*STREAMS, LAYOUT.objects_stream, "consumer"]


async def delete(bus: JetStreamBus, what: str) -> None:
    """Delete a stream of STREAMS, or the workers' consumer of prompts."""
    if what == "consumer":
        await bus._connection.api(f"CONSUMER.DELETE.{bus._layout.stream(PROMPTS)}.{WORKERS}")
    else:
        await bus._connection.api(f"STREAM.DELETE.{what.replace('RUN', bus._layout.run)}")


async def worker_of(bus: JetStreamBus, server: EmbeddedServer, connect: Connect) -> JetStreamBus:
    access = Credentials(role="rollout-worker", token=server.token)
    return await connect(server, run=bus._layout.run, access=access)


async def store_object(bus: JetStreamBus) -> None:
    await asyncio.to_thread(bus.objects().put, "a", [b"1"], metadata={})


async def test_check_finds_nothing_in_the_ordinary_life_of_a_run(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    await store_object(bus)
    for kill in (False, True):
        await publish_prompts(bus, 1, 2)
        await publish_groups(bus, 1, 2, 3)
        await bus.put(PROGRESS, progress(1))
        await bus.put(ACTORS, heartbeat("w0"), key="w0")
        async with taken(bus, 2) as deliveries, bus.lease("load", holder="w0"):
            await bus.check()
            for delivery in deliveries:
                await delivery.ack()
        await bus.check()
        await bus.trim(TRAJECTORIES, through=await bus.last_sequence(TRAJECTORIES))
        await bus.forget(PROGRESS, key="")
        await bus.forget(ACTORS, key="w0")
        await bus.check()
        if kill:
            os.kill(own_server.pid, 9)
        await asyncio.to_thread(own_server.stop)
        checking = asyncio.create_task(bus.check())  # a server that is away is waited for
        await asyncio.to_thread(own_server.start)
        await checking
        await bus.check()
        for number in (1, 2):
            await bus.withdraw(PROMPTS, key=str(number))


@pytest.mark.parametrize("what", EVERYTHING)
async def test_check_names_what_was_deleted(what: str, nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server)
    await store_object(bus)
    await bus.check()
    await delete(bus, what)
    name = "consumer workers of asyncrl-RUN-prompts" if what == "consumer" else what
    with pytest.raises(BusLost) as found:
        await bus.check()
    said = str(found.value)
    assert f"the run's {name.replace('RUN', bus._layout.run)} is gone: it was deleted; `asyncrl run FILE --" in said
    assert "\n" not in said


async def test_check_notices_a_stream_in_the_place_of_ours(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server)
    stream = bus._layout.stream(TRAJECTORIES)
    await delete(bus, stream)
    await bus._connection.api(f"STREAM.CREATE.{stream}", bus._layout.stream_config(TRAJECTORIES))
    with pytest.raises(BusLost, match="it was created again at"):
        await bus.check()


async def test_check_notices_a_store_that_went_back(
    own_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus = await connect(own_server)
    await publish_groups(bus, 1)
    async with going_back(own_server, tmp_path):
        await publish_groups(bus, 2, 3)
        await bus.check()
    with pytest.raises(BusLost, match="it ends at entry 1, and entry 3 was there"):
        await bus.check()


async def test_check_notices_a_store_that_is_gone(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    await asyncio.to_thread(own_server.stop)
    shutil.rmtree(own_server.directory / "jetstream")
    await asyncio.to_thread(own_server.start)
    with pytest.raises(BusLost, match="it was deleted"):
        await bus.check()


@pytest.mark.parametrize("what", EVERYTHING)
async def test_run_ends_when_something_is_deleted_and_resume_completes_it(
    what: str, nats_server: EmbeddedServer, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker outlives the end of the learner, as one that was started by hand does."""
    monkeypatch.setattr(learner_module, "CHECK_SECONDS", 0.02)
    sizes = {"max_prompts": 64, "max_log_bytes": 2**24}
    bus = await connect(nats_server, **sizes)
    await store_object(bus)
    helper = asyncio.create_task(run_worker(worker(await worker_of(bus, nats_server, connect), Engine())))
    lives = Loop(bus, tmp_path, steps=10**6, checkpoint_every=1)
    ended = asyncio.create_task(lives.run_learner())
    await until(lambda: lives.backend.steps >= 3 or ended.done())
    await delete(bus, what)
    with pytest.raises(BusLost):
        await ended
    await bus.close()

    bus = await connect(nats_server, run=bus._layout.run, **sizes)
    resumed = Loop(bus, tmp_path, steps=lives.backend.steps + 5, checkpoint_every=1)
    await resumed.run_learner(resume=True)
    await helper
    assert resumed.learner.is_finished
    entries = present(history.read(tmp_path / HISTORY_FILE))
    fates = Counter(group_id for entry in entries for group_id in entry.groups)
    assert set(fates.values()) == {1}
    assert set(range(max(fates))) - fates.keys() <= set(resumed.table.outstanding)


async def test_a_worker_waits_for_the_learner_that_makes_deleted_streams_again(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._NO_RESPONDER_SECONDS", 0.0)
    bus = await connect(nats_server)
    worker_bus = await worker_of(bus, nats_server, connect)
    await worker_bus.put(ACTORS, heartbeat("w0"), key="w0")
    for topic in (PROMPTS, TRAJECTORIES, PROGRESS, ACTORS, Lease.TOPIC):
        await delete(bus, bus._layout.stream(topic))

    async def delivered() -> str:
        async with worker_bus.consume(PROMPTS) as deliveries:
            return (await anext(deliveries)).key

    async def watched() -> int:
        async with worker_bus.watch(PROGRESS) as states:
            return (await anext(states)).step

    async def leased() -> bool:
        async with worker_bus.lease("load", holder="w0"):
            return True

    needs: list[Coroutine[Any, Any, Any]] = [
        delivered(),
        watched(),
        leased(),
        worker_bus.publish(TRAJECTORIES, group(1), key="1"),
        worker_bus.depth(TRAJECTORIES),
    ]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(need) for need in needs]
        _, still = await asyncio.wait(waiting, timeout=0.5)
        assert len(still) == len(needs)
        resumed = await connect(nats_server, run=bus._layout.run)
        await resumed.put(PROGRESS, progress(3))
        await resumed.publish(PROMPTS, prompt(7), key="7")
        assert (await asyncio.gather(*waiting))[:4] == ["7", 3, True, True]
    assert [record.key for record in await first(resumed, 1)] == ["1"]


async def test_a_wait_for_a_deleted_stream_is_logged_once(
    nats_server: EmbeddedServer, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._LAST_PAUSE_SECONDS", 0.05)
    bus = await connect(nats_server)
    other = await worker_of(bus, nats_server, connect)
    await delete(bus, bus._layout.stream(TRAJECTORIES))
    waiting = [asyncio.create_task(other.depth(TRAJECTORIES)) for _ in range(3)]
    said = "waiting for the learner to make it again"
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(120):
            while said not in caplog.text:
                await asyncio.sleep(0.01)
        await connect(nats_server, run=bus._layout.run)
        assert await asyncio.gather(*waiting) == [0, 0, 0]
    assert caplog.text.count(said) == 1


async def test_a_learner_survives_a_check_that_the_bus_refuses(
    nats_server: EmbeddedServer,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(learner_module, "CHECK_SECONDS", 0.001)
    bus = await connect(nats_server, max_prompts=64)

    async def busy() -> None:
        raise BusError("no quorum")

    monkeypatch.setattr(bus, "check", busy)
    helper = asyncio.create_task(run_worker(worker(await worker_of(bus, nats_server, connect), Engine())))
    loop = Loop(bus, tmp_path, steps=2)
    await loop.run_learner()
    await helper
    assert loop.learner.is_finished
    assert "the bus cannot be checked now: no quorum" in caplog.text
