"""Stores large objects on JetStream in the format of the NATS object store (ADR-20): chunks, then their metadata.

stream OBJ_asyncrl-RUN-weights    chunks on $O.BUCKET.C.ID, in order;  JSON on $O.BUCKET.M.base64url(NAME)

`nats object ls asyncrl-RUN-weights` lists the objects. An object exists once its JSON is stored, after all its chunks.
The JSON also lists the sequences of the chunks, so a reader requests chunks individually: many concurrently over a long
link, and a lost chunk again. Any replica of the stream may answer. A chunk missing on a lagging replica is requested
from the leader (test_chunk_missing_on_a_lagging_replica_is_read_from_the_leader). Objects use their own connection
and thread, so prompts and heartbeats do not queue behind gigabytes.

nats-py's ObjectStore (2.16) would save 150 lines. With it a read of an object that is removed meanwhile never returns,
chunks of a killed writer stay for good, and a put waits for a round trip per chunk (three tests of the suite fail, each
for one of these, and test_closing_the_bus_ends_a_retry).

Tests: tests/contracts/test_object_store.py.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import hashlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from asyncrl.bus.jetstream.connection import Connection, Refused
from asyncrl.bus.jetstream.layout import HEADER_BYTES, Layout
from asyncrl.bus.jetstream.streams import create_or_update, last_stored, read_message, subjects
from asyncrl.bus.port import ObjectInfo
from asyncrl.errors import BusError, ObjectGone

T = TypeVar("T")

CHUNK_BYTES: Final = 128 * 2**10
"""Default of the NATS object store. On a slow link a chunk must not delay the connection's pings."""
_MOST_IN_FLIGHT: Final = 128
_SLOW_SECONDS: Final = 1.0
_MOST_KNOWN: Final = 64


class JetStreamObjects:
    """See ``ObjectStore in bus/port.py``. Connects on first use."""

    def __init__(self, dial: Callable[[], Coroutine[Any, Any, Connection]], layout: Layout) -> None:
        """``dial`` opens a connection on the awaiting event loop."""
        self._dial, self._layout = dial, layout
        self._bucket, self._stream = layout.objects_bucket, layout.objects_stream
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._thread: threading.Thread | None = None
        self._known: dict[str, dict[str, Any]] = {}
        """Results of ``info`` for objects not read since. Over a long link a second request would take as long as
        reading. If such an object is removed in between, so are its chunks."""
        self.is_created = False  # whether this process created the stream
        self._is_closed = False

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        self._create_stream()
        before = self._read_info(name)
        chunk_bytes = min(CHUNK_BYTES, self._call(self._connect()).max_payload - HEADER_BYTES)
        identity, digest, num_bytes = uuid.uuid4().hex, hashlib.sha256(), 0
        subject = f"$O.{self._bucket}.C.{identity}"

        def stored() -> Iterator[Coroutine[Any, Any, int]]:
            nonlocal num_bytes
            for number, chunk in enumerate(_chunks(blocks, chunk_bytes)):
                digest.update(chunk)
                num_bytes += len(chunk)
                yield self._store(subject, chunk, {"Nats-Msg-Id": f"{identity}-{number}"})

        sequences = list(self._in_order(stored()))
        info = {
            "name": name,
            "bucket": self._bucket,
            "nuid": identity,
            "size": num_bytes,
            "chunks": len(sequences),
            "mtime": datetime.now(UTC).isoformat(),
            "digest": "SHA-256=" + base64.urlsafe_b64encode(digest.digest()).decode(),
            "options": {"max_chunk_size": chunk_bytes},
            "metadata": {**metadata, "sequences": _format_ranges(sequences)},
        }
        self._call(self._store(self._metadata_subject(name), json.dumps(info).encode(), {"Nats-Rollup": "sub"}))
        if before is not None:
            self._purge(f"$O.{self._bucket}.C.{before['nuid']}")
        return _info(info)

    def remove(self, name: str) -> None:
        info = self._read_info(name)
        self._purge(self._metadata_subject(name))
        if info is not None:
            self._purge(f"$O.{self._bucket}.C.{info['nuid']}")

    def names(self) -> set[str]:
        self._create_stream()
        return {_name(subject) for subject in self._subjects("M")}

    def _create_stream(self) -> None:
        """Create the stream. Remove what a killed writer left in it; nobody writes meanwhile."""
        with self._creating:
            if not self.is_created:
                self._create_stream_once()
                self.is_created = True

    def _create_stream_once(self) -> None:
        async def make() -> None:
            await create_or_update(await self._connect(), self._layout.objects_config())

        self._call(make())
        infos = [self._read_info(_name(subject)) for subject in self._subjects("M")]
        whole = {f"$O.{self._bucket}.C.{info['nuid']}" for info in infos if info is not None}
        for subject in self._subjects("C"):
            if subject not in whole:
                self._purge(subject)

    def _subjects(self, kind: str) -> list[str]:
        async def ask() -> list[str]:
            return list(await subjects(await self._connect(), self._stream, matching=f"$O.{self._bucket}.{kind}.>"))

        return self._call(ask())

    def _purge(self, subject: str) -> None:
        async def purge() -> None:
            await (await self._connect()).api(f"STREAM.PURGE.{self._stream}", {"filter": subject})

        self._call(purge())

    async def _store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        connection = await self._connect()
        found = (await connection.store(subject, data, headers={**headers, "Nats-Expected-Stream": self._stream})).found
        if "error" in found:
            raise Refused(f"object store {self._stream}", found["error"])
        return int(found["seq"])

    # -- reading ----------------------------------------------------------------------------------------------------

    def info(self, name: str) -> ObjectInfo | None:
        found = self._read_info(name)
        if found is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[name] = found
        return _info(found)

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        info = self._known.pop(name, None) or self._read_info(name)
        if info is None:
            raise ObjectGone(f"{name}: not in the object store {self._stream}")
        subject = f"$O.{self._bucket}.C.{info['nuid']}"
        sequences = _parse_ranges(info["metadata"]["sequences"])
        skipped, rest = divmod(start, int(info["options"]["max_chunk_size"]))
        asked = (self._chunk(name, subject, sequence) for sequence in sequences[skipped:])
        for chunk in self._in_order(asked):
            yield chunk[rest:]
            rest = 0

    async def _chunk(self, name: str, subject: str, sequence: int) -> bytes:
        stored = await read_message(await self._connect(), self._stream, sequence)
        if stored is None or stored.subject != subject:
            raise ObjectGone(f"{name}: removed from the object store {self._stream} while being read")
        return stored.data

    def _read_info(self, name: str) -> dict[str, Any] | None:
        return self._call(self._request_info(name))

    async def _request_info(self, name: str) -> dict[str, Any] | None:
        connection, subject = await self._connect(), self._metadata_subject(name)
        answer = await connection.request(f"$JS.API.DIRECT.GET.{self._stream}.{subject}")
        data = answer.data
        if "Status" in answer.headers:  # a replica may lag: the leader knows
            stored = await last_stored(connection, stream=self._stream, subject=subject)
            if stored is None:
                return None
            data = stored.data
        found: dict[str, Any] = json.loads(data)
        return None if found.get("deleted") else found

    def _metadata_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    # -- the connection's thread --------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            loop, self._loop, thread = self._loop, None, self._thread
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._disconnect(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _in_order(self, calls: Iterator[Coroutine[Any, Any, T]]) -> Iterator[T]:
        """Yield the results of the calls, in order. Run as many calls concurrently as ChunkWindow allows."""
        window, waiting = ChunkWindow(), deque[concurrent.futures.Future[T]]()
        is_over = False
        try:
            while True:
                while not is_over and len(waiting) < window.in_flight:
                    call = next(calls, None)
                    if call is None:
                        is_over = True
                    else:
                        waiting.append(self._submit(_measure(call, window)))
                if not waiting:
                    return
                yield self._result(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return self._result(self._submit(call))

    def _result(self, answer: concurrent.futures.Future[T]) -> T:
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise self._closed_error() from None

    def _closed_error(self) -> BusError:
        return BusError(f"object store {self._stream}: the connection is closed")

    def _submit(self, call: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._is_closed:
                call.close()
                raise self._closed_error()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="objects", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def _connect(self) -> Connection:
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            self._connecting = asyncio.ensure_future(self._dial())
        return await asyncio.shield(self._connecting)

    async def _disconnect(self) -> None:
        """Close the connection so that all waiters fail. On a stopped loop they would wait forever."""
        if self._connecting is not None:
            self._connecting.cancel()  # no effect if already done
            (connecting,) = await asyncio.gather(self._connecting, return_exceptions=True)
            if isinstance(connecting, Connection):
                await connecting.close()
        ours = asyncio.current_task()
        while others := [task for task in asyncio.all_tasks() if task is not ours]:
            _, left = await asyncio.wait(others, timeout=1.0)
            for task in left:
                task.cancel()


class ChunkWindow:
    """How many chunks to keep in flight: grows while replies are quick, halves when a reply is slow.

    A slow link then has about _SLOW_SECONDS of data in flight, and a long fast link is filled.
    """

    def __init__(self) -> None:
        self.in_flight = 4
        self._settled = 0.0

    def note(self, *, asked: float, answered: float) -> None:
        """Note the request and reply times of one chunk, in monotonic seconds."""
        if answered - asked <= _SLOW_SECONDS:
            self.in_flight = min(self.in_flight + 1, _MOST_IN_FLIGHT)
        elif asked >= self._settled:  # a request from before the last cut says nothing about the new window
            self.in_flight = max(self.in_flight // 2, 1)
            self._settled = answered


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())  # also runs one more iteration, in which transports close
    loop.close()


async def _measure(call: Coroutine[Any, Any, T], window: ChunkWindow) -> T:
    asked = time.monotonic()
    result = await call
    window.note(asked=asked, answered=time.monotonic())
    return result


def _chunks(blocks: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Return the same bytes in chunks of ``size``."""
    rest = bytearray()
    for block in blocks:
        rest += memoryview(block).cast("B")
        whole = len(rest) - len(rest) % size
        for start in range(0, whole, size):
            yield bytes(rest[start : start + size])
        del rest[:whole]
    if rest:
        yield bytes(rest)


def _format_ranges(sequences: list[int]) -> str:
    """Format sequences as ``4-7,9-9``. Chunks have consecutive sequences except after a lost connection."""
    ranges: list[list[int]] = []
    for sequence in sequences:
        if ranges and ranges[-1][1] + 1 == sequence:
            ranges[-1][1] = sequence
        else:
            ranges.append([sequence, sequence])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def _parse_ranges(ranges: str) -> list[int]:
    found: list[int] = []
    for part in ranges.split(",") if ranges else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last) + 1)
    return found


def _info(found: Mapping[str, Any]) -> ObjectInfo:
    digest = base64.urlsafe_b64decode(found["digest"].partition("=")[2])
    return ObjectInfo(
        name=found["name"], num_bytes=int(found["size"]), sha256=digest.hex(), metadata=dict(found["metadata"])
    )


def _name(subject: str) -> str:
    return base64.urlsafe_b64decode(subject.rpartition(".")[2]).decode()
