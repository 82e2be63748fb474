"""Reads a log, either through a consumer or by requesting several entries at a time.

A consumer delivers to any subject that its creator names, so on a server with roles only the learner may create one.
Other roles read by requests, at a third to a half of that speed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Final

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.layout import reader
from asyncrl.bus.jetstream.objects import ChunkWindow
from asyncrl.bus.jetstream.ordered_consumer import OrderedConsumer, Verify, Wire
from asyncrl.bus.jetstream.watch import StoredMessage, leaders_message

_READ_AHEAD_BYTES: Final = 16 * 2**20  # the server drops a connection that is 64 MiB behind
_READ_AHEAD: Final = 4096
_LOOK_SECONDS: Final = 0.5
"""How often a reader at the end of the log polls for new entries."""


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

    def __init__(self, wire: Wire, *, stream: str, after: int) -> None:
        self._wire, self._stream = wire, stream
        self._next, self._last = after + 1, after
        self._pace = ChunkWindow()
        self._asked: deque[asyncio.Task[StoredMessage | None]] = deque()

    async def take(self) -> StoredMessage:
        """waits for: an entry     woken by: the server, the clock"""
        while True:
            if not self._asked and self._next > self._last:
                await self._look()
            while self._next <= self._last and len(self._asked) < self._pace.in_flight:
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
        state = (await self._wire.api(f"STREAM.INFO.{self._stream}"))["state"]
        self._next, self._last = max(self._next, int(state["first_seq"])), int(state["last_seq"])

    async def _ask(self, sequence: int) -> StoredMessage | None:
        """Request one entry; None if it was trimmed."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        stored = await leaders_message(self._wire, self._stream, {"seq": sequence})
        self._pace.note(asked=asked, answered=clock())
        return stored
