"""Streams and consumers that are deleted, purged, altered or replaced while a run is up, on a real server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.lease import Lease
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.messages import Event
from asyncrl.messages.topics import ACTORS, EVENTS, PROGRESS, PROMPTS, TRAJECTORIES, Topic
from asyncrl.policies.health.diagnosis import diagnose
from tests.harness.buses import (
    first,
    group,
    heartbeat,
    progress,
    prompt,
    publish_groups,
    publish_prompts,
    taken,
)
from tests.integration.bus.test_jetstream_forgets import going_back

Connect = Callable[..., Awaitable[JetStreamBus]]


async def delete(bus: JetStreamBus, topic: Topic[Any]) -> None:
    await bus._connection.api(f"STREAM.DELETE.{bus._layout.stream(topic)}")


async def alter(bus: JetStreamBus, topic: Topic[Any], **changes: Any) -> None:
    stream = bus._layout.stream(topic)
    config = (await bus._connection.api(f"STREAM.INFO.{stream}"))["config"]
    await bus._connection.api(f"STREAM.UPDATE.{stream}", {**config, **changes})


async def repaired(bus: JetStreamBus) -> str:
    """Return the only loss, which the learner has repaired. Check that no further loss is found."""
    (loss,) = await bus.losses(repairs=True)
    assert loss.is_repaired
    assert await bus.losses(repairs=True) == []
    return f"{loss.name} {loss.problem}"


async def worker_of(bus: JetStreamBus, server: EmbeddedServer, connect: Connect) -> JetStreamBus:
    access = Credentials(role="rollout-worker", token=server.token)
    return await connect(server, run=bus._layout.run, access=access)


async def test_nothing_is_lost_in_the_ordinary_life_of_a_run(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server)
    await publish_prompts(bus, 1, 2)
    await publish_groups(bus, 1, 2, 3)
    await bus.put(PROGRESS, progress(1))
    await bus.put(ACTORS, heartbeat("w0"), key="w0")
    async with taken(bus, 1) as deliveries:
        await deliveries[0].ack()
    assert await bus.losses(repairs=True) == []
    await bus.trim(TRAJECTORIES, through=2)
    await bus.forget(PROGRESS, key="")
    await bus.forget(ACTORS, key="w0")
    async with bus.lease("load", holder="w0"):
        assert await bus.losses(repairs=True) == []
    await asyncio.to_thread(own_server.stop)
    await asyncio.to_thread(own_server.start)
    assert await bus.losses(repairs=True) == []
    assert await (await worker_of(bus, own_server, connect)).losses() == []


@pytest.mark.parametrize("topic", [PROMPTS, TRAJECTORIES, PROGRESS, ACTORS, Lease.TOPIC], ids=lambda topic: topic.name)
async def test_a_stream_that_is_deleted_is_named_and_made_again(
    topic: Topic[Any], nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    other = await worker_of(bus, nats_server, connect)
    await delete(bus, topic)
    (seen,) = [loss for loss in await other.losses() if loss.is_gone]
    assert topic.name in seen.topics
    assert not seen.is_repaired
    assert await repaired(bus) == f"{bus._layout.stream(topic)} was deleted"
    (seen,) = await other.losses()
    assert seen.problem == "was deleted and recreated"


async def test_whoever_needs_a_stream_that_is_gone_waits_for_it(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._NOBODY_SECONDS", 0.0)
    bus = await connect(nats_server)
    worker = await worker_of(bus, nats_server, connect)
    await worker.put(ACTORS, heartbeat("w0"), key="w0")
    for topic in (PROMPTS, TRAJECTORIES, PROGRESS, ACTORS, Lease.TOPIC):
        await delete(bus, topic)

    async def delivered() -> str:
        async with worker.consume(PROMPTS) as deliveries:
            return (await anext(deliveries)).key

    async def watched() -> int:
        async with worker.watch(PROGRESS) as states:
            return (await anext(states)).step

    async def leased() -> bool:
        async with worker.lease("load", holder="w0"):
            return True

    needs: list[Coroutine[Any, Any, Any]] = [
        delivered(),
        watched(),
        leased(),
        worker.publish(TRAJECTORIES, group(1), key="1"),
        bus.publish(PROMPTS, prompt(7), key="7"),
        bus.depth(TRAJECTORIES),
    ]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(need) for need in needs]
        _, still = await asyncio.wait(waiting, timeout=0.5)
        assert len(still) == len(needs)
        assert {loss.problem for loss in await bus.losses(repairs=True)} == {"was deleted"}
        await bus.put(PROGRESS, progress(3))
        assert (await asyncio.gather(*waiting))[:5] == ["7", 3, True, True, True]
    assert [record.key for record in await first(bus, 1)] == ["1"]


ALTERED: list[tuple[Topic[Any], dict[str, Any], str]] = [
    (TRAJECTORIES, {"max_bytes": 4096}, "max_bytes"),
    (TRAJECTORIES, {"discard": "old", "discard_new_per_subject": False}, "discard"),
    (TRAJECTORIES, {"max_age": 10**9, "duplicate_window": 10**9}, "max_age"),
    (TRAJECTORIES, {"subjects": ["elsewhere.{stream}"]}, "subjects"),
    (TRAJECTORIES, {"max_msg_size": 10}, "max_msg_size"),
    (PROMPTS, {"max_msgs": 1}, "max_msgs"),
    (PROGRESS, {"republish": None}, "republish"),
    (PROGRESS, {"max_age": 10**9, "duplicate_window": 10**9}, "max_age"),
    (ACTORS, {"allow_direct": False}, "allow_direct"),
    (TRAJECTORIES, {"sealed": True}, "sealed"),
    (TRAJECTORIES, {"deny_purge": True}, "deny_purge"),
]


@pytest.mark.parametrize(("topic", "changes", "name"), ALTERED, ids=[f"{t.name}-{n}" for t, _, n in ALTERED])
async def test_a_stream_that_is_altered_is_named_and_is_again_as_it_was(
    topic: Topic[Any], changes: dict[str, Any], name: str, nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    stream = bus._layout.stream(topic)
    if "subjects" in changes:
        changes = {"subjects": [f"elsewhere.{stream}"]}
    before = (await bus._connection.api(f"STREAM.INFO.{stream}"))["config"]
    await alter(bus, topic, **changes)
    onlooker = await worker_of(bus, nats_server, connect)
    said = await repaired(bus)
    assert said.startswith(f"{stream} was altered: ")
    assert f"{name} " in said
    after = (await bus._connection.api(f"STREAM.INFO.{stream}"))["config"]
    assert {**after, "metadata": None} == {**before, "metadata": None}
    assert await bus.publish(TRAJECTORIES, group(1), key="1")
    assert any(name in loss.problem or "recreated" in loss.problem for loss in await onlooker.losses())


@pytest.mark.parametrize("topic", [PROMPTS, TRAJECTORIES, PROGRESS], ids=lambda topic: topic.name)
async def test_a_stream_that_was_sealed_while_no_learner_was_up_is_recreated(
    topic: Topic[Any], nats_server: EmbeddedServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    before = await connect(nats_server)
    await alter(before, topic, sealed=True)
    await before.close()
    bus = await connect(nats_server, run=before._layout.run)
    assert f"{bus._layout.stream(topic)} was altered while no learner was up: sealed" in caplog.text
    assert await bus.publish(TRAJECTORIES, group(1), key="1")
    await publish_prompts(bus, 1)
    await bus.put(PROGRESS, progress(3))
    assert await bus.losses(repairs=True) == []


async def test_a_stream_that_somebody_put_in_the_place_of_ours_is_recreated(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    await delete(bus, TRAJECTORIES)
    stream = bus._layout.stream(TRAJECTORIES)
    config = {"name": stream, "subjects": [f"elsewhere.{stream}"], "retention": "workqueue", "storage": "memory"}
    await bus._connection.api(f"STREAM.CREATE.{stream}", config)
    assert "was deleted and recreated and was altered" in await repaired(bus)
    assert await bus.publish(TRAJECTORIES, group(1), key="1")


async def test_another_stream_on_our_subjects_is_said_and_waited_for(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    await delete(bus, TRAJECTORIES)
    subject = bus._layout.prefix(TRAJECTORIES) + "*"
    await bus._connection.api("STREAM.CREATE.thief", {"name": "thief", "subjects": [subject], "storage": "memory"})
    published = asyncio.create_task(bus.publish(TRAJECTORIES, group(1), key="1"))
    (loss,) = await bus.losses(repairs=True)
    assert loss.is_gone
    assert "cannot be made again (subjects overlap" in loss.problem
    assert not published.done()
    await bus._connection.api("STREAM.DELETE.thief")
    await repaired(bus)
    assert await published


async def test_a_log_that_is_gone_is_not_waited_for_by_a_trim(nats_server: EmbeddedServer, connect: Connect) -> None:
    """The replacement log has other entries under those sequences, which have not been read."""
    bus = await connect(nats_server)
    await publish_groups(bus, 1, 2, 3)
    await bus._connection.api(f"STREAM.DELETE.{bus._layout.stream(TRAJECTORIES)}")
    await bus.trim(TRAJECTORIES, through=2)
    assert "was deleted" in await repaired(bus)
    await publish_groups(bus, 4, 5)
    assert [record.sequence for record in await first(bus, 2)] == [1, 2]


async def test_entries_that_somebody_purged_are_told_from_those_that_we_trimmed(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    stream = bus._layout.stream(TRAJECTORIES)
    await publish_groups(bus, 1, 2, 3, 4)
    await bus.trim(TRAJECTORIES, through=1)
    assert await bus.losses(repairs=True) == []
    await bus._connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
    assert await repaired(bus) == f"{stream} lost 1 of its entries"
    await bus._connection.api(f"STREAM.PURGE.{stream}")
    assert await repaired(bus) == f"{stream} lost its entries up to 4"
    await bus.put(PROGRESS, progress(1))
    assert await bus.losses(repairs=True) == []
    states = bus._layout.stream(PROGRESS)
    await bus._connection.api(f"STREAM.PURGE.{states}")
    assert await repaired(bus) == f"{states} lost 1 of its 1 states"


async def test_events_that_somebody_purged_are_told_by_who_only_looks_too(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    """Events are kept for days, so none can have expired."""
    bus = await connect(nats_server)
    stream = bus._layout.stream(EVENTS)
    for number in range(3):
        event = Event(kind="dropped", actor="learner", time=1.0, data={"group_id": number})
        await bus.publish(EVENTS, event, key=str(number))
    onlooker = await worker_of(bus, nats_server, connect)
    await onlooker.depth(EVENTS)
    assert await onlooker.losses() == await bus.losses(repairs=True) == []
    await bus._connection.api(f"STREAM.PURGE.{stream}")
    (loss,) = await onlooker.losses()
    assert (loss.problem, loss.is_gone) == ("lost its entries up to 3", False)
    assert await repaired(bus) == f"{stream} lost its entries up to 3"


async def test_heartbeats_that_somebody_purged_are_missed_by_a_watcher(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)

    async def join() -> Bus:
        return bus

    watcher = HealthMonitor(join)
    beats = itertools.count(1)

    async def look() -> list[str]:
        """Look as the watcher of a run whose learner has sent a heartbeat since the last look."""
        beat = replace(heartbeat("learner"), role="learner", beat=next(beats))
        await bus.put(ACTORS, beat, key="learner")
        return [one.text for one in diagnose(await watcher.look())]

    assert [await look(), await look()] == [[], []]
    await bus._connection.api(f"STREAM.PURGE.{bus._layout.stream(ACTORS)}")
    assert await look() == ["nats-server: heartbeats were removed"]


async def test_a_store_that_went_back_is_named(own_server: EmbeddedServer, connect: Connect, tmp_path: Path) -> None:
    bus = await connect(own_server)
    await publish_groups(bus, 1)
    async with going_back(own_server, tmp_path):
        await publish_groups(bus, 2, 3)
        assert await bus.losses(repairs=True) == []
    assert await repaired(bus) == f"{bus._layout.stream(TRAJECTORIES)} went back from entry 3 to 1"


CONSUMER: list[tuple[str, dict[str, Any]]] = [
    ("CREATE", {"filter_subject": "nothing"}),
    ("CREATE", {"ack_wait": 10**6}),
    ("CREATE", {"max_deliver": 1}),
    ("PAUSE", {"pause_until": "2100-01-01T00:00:00Z"}),
]


@pytest.mark.parametrize(("verb", "change"), CONSUMER, ids=[next(iter(change)) for _, change in CONSUMER])
async def test_a_consumer_of_prompts_that_is_altered_is_recreated(
    verb: str, change: dict[str, Any], nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    assert await bus.losses(repairs=True) == []
    stream = bus._layout.stream(PROMPTS)
    if "filter_subject" in change:
        change = {"filter_subject": bus._layout.prefix(PROMPTS) + "nothing"}
    config = {**bus._layout.workers(), **change}
    body = change if verb == "PAUSE" else {"stream_name": stream, "config": config, "action": ""}
    await bus._connection.api(f"CONSUMER.{verb}.{stream}.workers", body)
    assert next(iter(change)) in await repaired(bus)
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as deliveries:
        assert deliveries[0].key == "1"


@pytest.mark.parametrize(("verb", "change"), CONSUMER, ids=[next(iter(change)) for _, change in CONSUMER])
async def test_a_consumer_of_prompts_that_was_altered_while_no_learner_was_up_is_recreated(
    verb: str, change: dict[str, Any], nats_server: EmbeddedServer, connect: Connect
) -> None:
    before = await connect(nats_server, run="altered" + next(iter(change)).replace("_", ""))
    stream = before._layout.stream(PROMPTS)
    body = change if verb == "PAUSE" else {"stream_name": stream, "config": before._layout.workers() | change}
    await before._connection.api(f"CONSUMER.{verb}.{stream}.workers", body)
    await before.close()
    bus = await connect(nats_server, run=before._layout.run)
    await bus.losses(repairs=True)
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as deliveries:
        assert deliveries[0].key == "1"


async def test_a_deleted_consumer_of_prompts_is_named(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server)
    assert await bus.losses(repairs=True) == []
    await bus._connection.api(f"CONSUMER.DELETE.{bus._layout.stream(PROMPTS)}.workers")
    assert "workers was deleted" in await repaired(bus)


async def test_a_wait_for_a_stream_is_said_once(
    nats_server: EmbeddedServer, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.connection._LAST_PAUSE_SECONDS", 0.05)
    bus = await connect(nats_server)
    await delete(bus, TRAJECTORIES)
    waiting = [asyncio.create_task(bus.depth(TRAJECTORIES)) for _ in range(3)]
    said = "waiting for the learner to make it again"
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(120):
            while said not in caplog.text:
                await asyncio.sleep(0.01)
        await bus.losses(repairs=True)
        assert await asyncio.gather(*waiting) == [0, 0, 0]
    assert caplog.text.count(said) == 1
