"""The contract of every ObjectStore (asyncrl/bus/port.py), over memory and a real nats-server."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.connection import Connection, Reply
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.objects import CHUNK_BYTES, ChunkWindow, JetStreamObjects
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import BusError, ObjectGone
from tests.conftest import BUS_SIZES
from tests.harness.buses import Proxy
from tests.harness.fixtures import BusFactory


async def put(store: Any, name: str, data: bytes, **metadata: str) -> Any:
    """Store data in blocks that align with no chunk."""
    blocks = [data[start : start + 99_991] for start in range(0, len(data), 99_991)]
    return await asyncio.to_thread(store.put, name, blocks, metadata=metadata)


async def read(store: Any, name: str, start: int = 0) -> bytes:
    return b"".join(await asyncio.to_thread(lambda: list(store.read(name, start=start))))


@pytest.fixture
async def stores(bus_factory: BusFactory) -> AsyncIterator[tuple[Any, Any]]:
    """Two views of one store: a writer's and a reader's."""
    yield (await bus_factory()).objects(), (await bus_factory()).objects()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
async def test_object_reads_back(stores: tuple[Any, Any], size: int) -> None:
    writer, reader = stores
    data = os.urandom(size)
    info = await put(writer, "0-1.full", data, why="a test")
    assert (info.num_bytes, info.sha256) == (size, hashlib.sha256(data).hexdigest())
    found = await asyncio.to_thread(reader.info, "0-1.full")
    assert found == info
    assert found.metadata["why"] == "a test"
    assert await read(reader, "0-1.full") == data


@pytest.mark.parametrize("start", [1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5, 3 * CHUNK_BYTES])
async def test_read_starts_at_any_byte(stores: tuple[Any, Any], start: int) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    await put(stores[0], "a", data)
    assert await read(stores[1], "a", start) == data[start:]


async def test_object_of_the_same_name_replaces_the_previous_one(stores: tuple[Any, Any]) -> None:
    writer, reader = stores
    await put(writer, "a", b"old" * CHUNK_BYTES)
    await put(writer, "a", b"new")
    assert await read(reader, "a") == b"new"
    assert await asyncio.to_thread(writer.names) == {"a"}


async def test_removed_object_is_gone(stores: tuple[Any, Any]) -> None:
    writer, reader = stores
    await put(writer, "a", b"1")
    await put(writer, "b", b"2")
    await asyncio.to_thread(writer.remove, "a")
    await asyncio.to_thread(writer.remove, "never was")
    assert await asyncio.to_thread(writer.names) == {"b"}
    assert await asyncio.to_thread(reader.info, "a") is None
    with pytest.raises(ObjectGone, match="a: not in the object store"):
        await read(reader, "a")


# -- JetStream alone ---------------------------------------------------------------------------------------------------

Connect = Callable[..., Awaitable[JetStreamBus]]


async def chunks_stored(bus: JetStreamBus, store: JetStreamObjects) -> int:
    info = await bus._connection.api(f"STREAM.INFO.{store._stream}")
    return int(info["state"]["messages"])


async def test_object_removed_during_a_read_raises_instead_of_ending(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    writer = (await connect(nats_server, run="removed")).objects()
    reader = (await connect(nats_server, run="removed")).objects()
    await put(writer, "a", os.urandom(200 * CHUNK_BYTES))
    chunks = reader.read("a")
    await asyncio.to_thread(next, chunks)
    await asyncio.to_thread(writer.remove, "a")
    with pytest.raises(ObjectGone, match="removed from the object store"):
        await asyncio.to_thread(list, chunks)


async def test_chunks_of_a_killed_writer_are_invisible_and_removed_by_the_next(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    first = await connect(nats_server, run="died")
    await put(first.objects(), "whole", b"1")

    def dying() -> Any:
        yield os.urandom(CHUNK_BYTES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await _in_thread(lambda: first.objects().put("half", dying(), metadata={}))
    second = await connect(nats_server, run="died")
    store = second.objects()
    assert await asyncio.to_thread(store.names) == {"whole"}
    assert isinstance(store, JetStreamObjects)
    assert await chunks_stored(second, store) == 2  # a chunk and its metadata


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread and catch KeyboardInterrupt there, because asyncio would treat it as its own."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except KeyboardInterrupt as error:
            failed.append(error)

    await asyncio.to_thread(run)
    if failed:
        raise failed[0]


async def test_read_continues_after_a_lost_connection(nats_server: EmbeddedServer, connect: Connect) -> None:
    data = os.urandom(300 * CHUNK_BYTES)
    await put((await connect(nats_server, run="cut")).objects(), "a", data)
    async with Proxy(nats_server.port) as proxy:
        bus = await JetStreamBus.connect(proxy.url, run="cut", token=nats_server.token, storage="file", **BUS_SIZES)
        chunks, found = bus.objects().read("a"), []
        for number in itertools.count():
            if (chunk := await asyncio.to_thread(next, chunks, None)) is None:
                break
            found.append(chunk)
            if number in (3, 150):
                proxy.cut()
        assert b"".join(found) == data
        await bus.close()


async def test_write_across_a_server_restart_stores_every_chunk_once(
    own_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(own_server, run="restart")
    data = os.urandom(100 * CHUNK_BYTES)

    def blocks() -> Any:
        for start in range(0, len(data), CHUNK_BYTES):
            if start == 40 * CHUNK_BYTES:
                own_server.stop()
                own_server.start()
            yield data[start : start + CHUNK_BYTES]

    await asyncio.to_thread(bus.objects().put, "a", blocks(), metadata={})
    assert await read(bus.objects(), "a") == data


async def test_chunk_missing_on_a_lagging_replica_is_read_from_the_leader(
    nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = (await connect(nats_server, run="behind")).objects()
    data = os.urandom(2 * CHUNK_BYTES + 3)
    await put(store, "a", data)
    before = await asyncio.to_thread(store.info, "a")
    request = Connection.request

    async def behind(connection: Connection, subject: str, body: bytes = b"", **options: Any) -> Reply:
        if subject.startswith("$JS.API.DIRECT.GET."):
            return Reply(b"", {"Status": "404", "Description": "Message Not Found"}, False)
        return await request(connection, subject, body, **options)

    monkeypatch.setattr(Connection, "request", behind)
    assert await asyncio.to_thread(store.info, "a") == before
    assert await read(store, "a") == data
    found = await asyncio.to_thread(store._read_info, "a")
    await asyncio.to_thread(store.remove, "a")
    assert await asyncio.to_thread(store.info, "a") is None
    with pytest.raises(ObjectGone, match="removed from the object store"):
        await asyncio.to_thread(store._call, store._chunk("a", f"$O.{store._bucket}.C.{found['nuid']}", 1))


async def test_closing_the_bus_ends_a_read(own_server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect(own_server, run="closed")
    await put(bus.objects(), "a", os.urandom(200 * CHUNK_BYTES))
    chunks = bus.objects().read("a")
    await asyncio.to_thread(next, chunks)
    own_server.stop()
    reading = asyncio.create_task(asyncio.to_thread(list, chunks))
    await asyncio.wait((reading,), timeout=0.3)
    assert not reading.done()
    await bus.close()
    with pytest.raises(BusError, match="closed"):
        await reading


async def test_closing_the_bus_ends_a_retry(own_server: EmbeddedServer, connect: Connect) -> None:
    """Otherwise the process would wait forever for the thread when it ends."""
    bus = await connect(own_server, run="pause")
    await put(bus.objects(), "a", b"1")
    await bus._connection.api(f"STREAM.DELETE.{bus._layout.objects_stream}")  # no server answers the requests now
    asking = [asyncio.create_task(asyncio.to_thread(bus.objects().info, "a")) for _ in range(4)]
    await asyncio.wait(asking, timeout=3.5)  # by now the pauses between retries are two seconds long
    await bus.close()
    for asked in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(asked, BusError)
        assert "closed" in str(asked)


async def test_closing_the_bus_ends_a_call_that_ignores_it() -> None:
    """This holds for every kind of wait."""
    entered = threading.Event()

    async def dial() -> Any:
        entered.set()
        await asyncio.Event().wait()

    async def wait() -> None:
        await asyncio.Event().wait()

    layout = Layout(run="deaf", max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="file")
    store = JetStreamObjects(dial, layout)
    asking = [
        asyncio.create_task(asyncio.to_thread(call)) for call in (lambda: store.info("a"), lambda: store._call(wait()))
    ]
    await asyncio.to_thread(entered.wait)
    await asyncio.to_thread(store.close)
    for asked in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(asked, BusError)
        assert "closed" in str(asked)


@pytest.mark.slow
async def test_nats_py_reads_our_objects(nats_server: EmbeddedServer, connect: Connect) -> None:
    """By ADR-20, every client's object store can read them."""
    data = os.urandom(5 * CHUNK_BYTES + 3)
    await put((await connect(nats_server, run="others")).objects(), "a", data)
    script = (
        "import asyncio, hashlib, nats, sys\n"
        "async def main():\n"
        "    client = await nats.connect(sys.argv[1], token=sys.argv[2])\n"
        "    store = await client.jetstream().object_store('asyncrl-others-weights')\n"
        "    print(hashlib.sha256((await store.get('a')).data).hexdigest())\n"
        "    await client.close()\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, nats_server.url, nats_server.token],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(data).hexdigest()


# -- pace --------------------------------------------------------------------------------------------------------------


def test_chunks_in_flight_grow_with_quick_replies_and_shrink_with_slow_ones() -> None:
    pace = ChunkWindow()
    for number in range(1000):
        pace.note(asked=number, answered=number + 0.2)
    most = pace.in_flight
    pace.note(asked=1000, answered=1010)
    assert pace.in_flight == most // 2
    pace.note(asked=1001, answered=1011)  # asked before the slow answer was noted
    assert pace.in_flight == most // 2
    for number in range(1020, 3000, 10):
        pace.note(asked=number, answered=number + 5)
    assert pace.in_flight == 1


async def test_object_is_read_in_one_round_trip_after_info(stores: tuple[Any, Any]) -> None:
    """Over a long distance, each round trip delays new weights. A replacement stored in between is found the next
    time."""
    writer, reader = stores
    await put(writer, "a", b"first")
    assert await asyncio.to_thread(reader.info, "a") is not None
    if isinstance(reader, JetStreamObjects):
        asked: list[str] = []
        connection = reader._call(reader._connect())
        request = connection.request

        async def counted(subject: str, *given: Any, **options: Any) -> Any:
            asked.append(subject)
            return await request(subject, *given, **options)

        connection.request = counted  # type: ignore[method-assign]
        assert await read(reader, "a") == b"first"
        assert len(asked) == 1
        connection.request = request  # type: ignore[method-assign]
    assert await asyncio.to_thread(reader.info, "a") is not None
    await put(writer, "a", b"second")
    try:
        assert await read(reader, "a") == b"second"
    except ObjectGone:
        assert await read(reader, "a") == b"second"
