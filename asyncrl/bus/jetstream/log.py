"""Reads a log: its entries as records, decoded, with messages in pieces put together.

The learner reads through a consumer. A consumer delivers to any subject that its creator names, so on a server with
roles only the learner may create one. Other roles request several entries at a time, at a third to half of that speed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Generic, TypeVar

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.consumers import Arrival, OrderedConsumer, Transport, Verify
from asyncrl.bus.jetstream.layout import Layout, reader
from asyncrl.bus.jetstream.objects import ChunkWindow
from asyncrl.bus.jetstream.watch import StoredMessage, last_stored, leaders_message
from asyncrl.bus.pieces import Pieces
from asyncrl.bus.port import Record
from asyncrl.messages.topics import PIECES, Topic

M = TypeVar("M")

_READ_AHEAD_BYTES: Final = 16 * 2**20  # the server drops a connection that is 64 MiB behind
_READ_AHEAD: Final = 4096
_LOOK_SECONDS: Final = 0.5
"""How often a reader at the end of the log polls for new entries."""


class Records(Generic[M]):
    """Records of one reader. ``take`` may be cancelled and called again."""

    def __init__(
        self,
        source: OrderedConsumer | LogReader,
        topic: Topic[M],
        *,
        key_of: Callable[[str], str],
        pieces: Pieces,
        first_sequence: Callable[[], Awaitable[int]],
    ) -> None:
        """
        key_of          maps a subject to its key
        first_sequence  returns the first sequence of the log now
        """
        self._source, self._topic, self._key_of = source, topic, key_of
        self._pieces, self._first_sequence = pieces, first_sequence
        self._held: StoredMessage | Arrival | None = None  # entry whose pieces are being fetched

    async def take(self) -> Record[M]:
        """waits for: an entry, then its pieces"""
        while True:
            self._held = item = self._held or await self._source.take()
            key = self._key_of(item.subject)
            content, num_bytes = await self._pieces.opened(self._topic, key=key, data=item.data)
            is_trimmed = content.is_missing and item.sequence < await self._first_sequence()
            self._held = None
            if is_trimmed:  # the log was trimmed after we received the entry, and its pieces were removed
                continue
            return Record(
                sequence=item.sequence,
                key=key,
                message=content.message,
                problem=content.problem,
                num_bytes=num_bytes,
                stored=item.stored,
            )


class PieceStore:
    """The pieces of a run. ``stream`` returns the name of a topic's stream."""

    def __init__(
        self, connection: Connection, layout: Layout, *, stream: Callable[[Topic[Any]], Awaitable[str]]
    ) -> None:
        self._connection, self._layout, self._stream = connection, layout, stream

    async def fetch(self, key: str) -> bytes | None:
        """Return the data of a piece. Read from the leader, because other servers of a cluster may not have it yet."""
        subject = self._layout.subject(PIECES, key)
        stored = await last_stored(self._connection, stream=await self._stream(PIECES), subject=subject)
        return None if stored is None else stored.data

    async def remove(self, keys: Collection[str]) -> None:
        stream = await self._stream(PIECES)
        for key in keys:
            await self._connection.api(f"STREAM.PURGE.{stream}", {"filter": self._layout.subject(PIECES, key)})


async def open_log(
    connection: Connection, *, stream: str, after: int, by_consumer: bool, verify: Verify | None
) -> OrderedConsumer | LogReader:
    """Return a source of the entries after sequence ``after``, in order. The caller stops it.

    verify  as in OrderedConsumer
    """
    if not by_consumer:
        return LogReader(connection, stream=stream, after=after)
    consumer = OrderedConsumer(
        connection,
        stream=stream,
        create=lambda last: reader(f"reader-{uuid.uuid4().hex}", after=max(after, last)),
        batch=_READ_AHEAD,
        max_bytes=max(_READ_AHEAD_BYTES, 2 * connection.max_payload),
        verify=verify,
    )
    try:
        await consumer.start()
    except BaseException:
        await consumer.stop()
        raise
    return consumer


class LogReader:
    """Reads the entries after sequence ``after``. Call ``take`` for each entry, then ``stop``."""

    def __init__(self, transport: Transport, *, stream: str, after: int) -> None:
        self._transport, self._stream = transport, stream
        self._next, self._last = after + 1, after
        self._window = ChunkWindow()
        self._asked: deque[asyncio.Task[StoredMessage | None]] = deque()

    async def take(self) -> StoredMessage:
        """waits for: an entry     woken by: the server, the clock"""
        while True:
            if not self._asked and self._next > self._last:
                await self._look()
            while self._next <= self._last and len(self._asked) < self._window.in_flight:
                self._asked.append(asyncio.create_task(self._ask(self._next)))
                self._next += 1
            if not self._asked:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            await asyncio.wait((self._asked[0],))  # cancelling us must not cancel the request
            if (stored := self._asked.popleft().result()) is not None:
                return stored

    async def stop(self) -> None:
        for task in self._asked:
            task.cancel()
        if self._asked:
            await asyncio.wait(self._asked)

    async def _look(self) -> None:
        state = (await self._transport.api(f"STREAM.INFO.{self._stream}"))["state"]
        self._next, self._last = max(self._next, int(state["first_seq"])), int(state["last_seq"])

    async def _ask(self, sequence: int) -> StoredMessage | None:
        """Request one entry; None if it was trimmed."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        stored = await leaders_message(self._transport, self._stream, {"seq": sequence})
        self._window.note(asked=asked, answered=clock())
        return stored
