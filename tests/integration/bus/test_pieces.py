"""Groups larger than a message, on a real nats-server: kills between the two writes, roles, losses, and whole runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import Forbidden
from asyncrl.messages import replace
from asyncrl.messages.topics import PIECES, TRAJECTORIES
from tests.harness.buses import first, first_event, group
from tests.harness.fakes import Engine, Loop, run_all, run_worker, worker
from tests.harness.roles import Server, connected

Connect = Callable[..., Awaitable[JetStreamBus]]

MESSAGE_BYTES = 8 * 2**10
ROOM = 2**24
LARGE = 300_000
"""Tokens of a group that takes three messages of 2**20 bytes."""
MANY = 96
"""Samples of four tokens each in a group that takes three messages of 8 kB."""

DYING = """
import asyncio, sys
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.messages.topics import TRAJECTORIES
from tests.conftest import BUS_SIZES
from tests.harness.buses import group

async def main(url, token):
    sizes = BUS_SIZES | {"max_log_bytes": 2**24}
    bus = await JetStreamBus.connect(url, run="killed", token=token, storage="file", **sizes)
    store = bus._connection.store

    async def stored(subject, data, **headers):
        if ".trajectories." in subject:
            print("between", flush=True)
            await asyncio.Event().wait()
        return await store(subject, data, **headers)

    bus._connection.store = stored
    await bus.publish(TRAJECTORIES, group(5, tokens=300_001), key="5")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that accepts messages of at most 8 kB."""
    with EmbeddedServer(tmp_path / "bus", max_message_bytes=MESSAGE_BYTES) as server:
        yield server


async def test_pieces_of_a_killed_writer_are_removed_in_the_end(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, run="killed", max_log_bytes=ROOM)
    command = (sys.executable, "-c", DYING, nats_server.url, nats_server.token)
    dying = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert dying.stdout is not None
    assert await dying.stdout.readline() == b"between\n"
    dying.kill()
    await dying.wait()
    left = await bus.keys(PIECES)
    assert (len(left), await bus.depth(TRAJECTORIES)) == (3, 0)
    await bus.publish(TRAJECTORIES, group(5, tokens=LARGE), key="5")  # answered by the worker that gets the prompt next
    (record,) = await first(bus, 1)
    assert len(record.message.trajectories[0].tokens) == LARGE
    await bus.trim(TRAJECTORIES, through=0, is_over=lambda name: False)
    assert left < await bus.keys(PIECES)
    await bus.trim(TRAJECTORIES, through=1, is_over=lambda name: name == "5")
    assert await bus.keys(PIECES) == set()


async def test_reader_skips_entries_trimmed_after_they_were_sent(nats_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(nats_server, max_log_bytes=ROOM)
    for number in (1, 2, 3):
        await bus.publish(TRAJECTORIES, group(number, tokens=LARGE), key=str(number))
    async with bus.read(TRAJECTORIES) as records:
        assert (await anext(records)).sequence == 1
        await bus.trim(TRAJECTORIES, through=2, is_over=lambda name: name != "3")
        record = await anext(records)
        assert (record.sequence, record.message.group_id) == (3, 3)


async def test_reader_cancelled_while_fetching_pieces_yields_the_entry_next_time(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server, max_log_bytes=ROOM)
    await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    fetch, asked = bus._pieces._fetch, asyncio.Event()

    async def slow(key: str) -> bytes | None:
        asked.set()
        await asyncio.Event().wait()
        return None

    bus._pieces._fetch = slow
    async with bus.read(TRAJECTORIES) as records:
        waiting = asyncio.ensure_future(anext(records))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        bus._pieces._fetch = fetch
        assert (await anext(records)).message.group_id == 1


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("nats") / "server")
    yield made
    made.close()


async def test_workers_write_pieces_and_observers_read_them(server: Server) -> None:
    tokens, room = 2_000_000, 2**26  # this server accepts messages of 8 MiB
    async with connected(server, "learner", max_log_bytes=room):
        async with connected(server, "rollout-worker", max_log_bytes=room) as rollout:
            assert await rollout.publish(TRAJECTORIES, replace(group(1, tokens=tokens), worker="w0"), key="w0/1")
            keys = await rollout.keys(PIECES)
            assert len(keys) == 3
            with pytest.raises(Forbidden):
                await rollout._pieces._fetch(min(keys))
            with pytest.raises(Forbidden):
                await rollout._pieces._remove(keys)
        for role in ("learner", "observer", "operator"):
            async with connected(server, role, max_log_bytes=room) as bus:
                (record,) = await first(bus, 1)
                assert (record.message.group_id, len(record.message.trajectories[0].tokens)) == (1, tokens)
                if role != "learner":
                    with pytest.raises(Forbidden):
                        await bus._pieces._remove(keys)


# -- whole runs --------------------------------------------------------------------------------------------------------


async def test_run_with_groups_larger_than_a_message_trains_them_all(
    small_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus, other = [await connect(small_server, run="run", max_log_bytes=ROOM) for _ in range(2)]
    loop = Loop(bus, tmp_path / "run", steps=6, checkpoint_every=1, group_size=MANY)
    await run_all(loop, worker(other, Engine()))
    made = await account_with(RecordedRun(loop.directory), bus)
    assert (made.problems, made.trained, made.failed) == ((), 12, 0)
    assert await bus.last_sequence(PIECES) >= 2 * 12
    groups = {key.rpartition("/")[0] for key in await bus.keys(PIECES)}
    # all other pieces left with their entries
    assert groups == {key.split("-")[0] for key in await bus.keys(TRAJECTORIES)}
    assert len(groups) < 12


async def test_worker_killed_between_pieces_and_entry_loses_nothing(
    small_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus, dying, other = [await connect(small_server, run="run", max_log_bytes=ROOM) for _ in range(3)]
    loop = Loop(bus, tmp_path / "run", checkpoint_every=1, group_size=MANY)
    store, between = dying._connection.store, asyncio.Event()

    async def stored(subject: str, data: bytes, **headers: Any) -> Any:
        if ".trajectories." in subject:
            between.set()
            await asyncio.Event().wait()
        return await store(subject, data, **headers)

    dying._connection.store = stored
    async with asyncio.TaskGroup() as tasks:
        ends = tasks.create_task(loop.run_learner())
        victim = asyncio.create_task(run_worker(worker(dying, Engine())))
        await between.wait()
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        tasks.create_task(run_worker(worker(other, Engine(), name="w1")))
        await ends
    made = await account_with(RecordedRun(loop.directory), bus)
    assert (made.problems, made.trained, made.failed) == ((), 8, 0)


async def test_group_with_deleted_pieces_is_failed_and_the_run_goes_on(
    small_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus, other = [await connect(small_server, run="run", max_log_bytes=ROOM) for _ in range(2)]
    loop = Loop(bus, tmp_path / "run", checkpoint_every=1, group_size=MANY)
    encoded = other._pieces.encoded

    async def robbed(topic: Any, message: Any, *, key: str) -> bytes:
        data = await encoded(topic, message, key=key)
        if topic is TRAJECTORIES and key == "w0/3":
            await bus._pieces._remove([one for one in await bus.keys(PIECES) if one.startswith("w0/3/")])
        return data

    other._pieces.encoded = robbed
    await run_all(loop, worker(other, Engine()))
    made = await account_with(RecordedRun(loop.directory), bus)
    assert (made.problems, made.trained, made.failed) == ((), 8, 1)
    event = await first_event(bus, "failed")
    assert event.data["group_id"] == 3
    assert "pieces of it are not on the bus" in str(event.data)
