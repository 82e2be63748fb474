"""Reads a log: its entries in order as records, decoded, with messages in pieces put together.

A reader keeps a cursor and requests entries by their sequence, several at a time. The server keeps no state for it, so
nothing has to be made again after a reconnect or an election. The stream republishes the header of each new entry,
with its sequence, so a learner at the end of the log asks for it at once; the other roles poll.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Generic, TypeVar

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.objects import ChunkWindow
from asyncrl.bus.jetstream.streams import StoredMessage, last_stored
from asyncrl.bus.pieces import Pieces
from asyncrl.bus.port import LogMark, Record
from asyncrl.messages.topics import PIECES, Topic

M = TypeVar("M")

_POLL_SECONDS: Final = 0.5
"""How often a reader at the end of the log looks for new entries that were not announced to it."""


class Records(Generic[M]):
    """Records of one reader. ``take`` may be cancelled and called again."""

    def __init__(
        self,
        source: LogReader,
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
        self._held: StoredMessage | None = None  # entry whose pieces are being fetched

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


class LogReader:
    """Reads the entries after sequence ``after``, in order. Call ``take`` for each entry, then ``stop``."""

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        after: int,
        find: Callable[[int], Awaitable[StoredMessage | None]],
        look: Callable[[LogMark], Awaitable[dict[str, Any]]],
        republished: str = "",
    ) -> None:
        """
        find         returns an entry by its sequence; None if it was trimmed
        look         returns the state of the stream. Called with the last entry that was read; may raise BusLost
        republished  subject that announces new entries; "" if our role may not follow it, and polls
        """
        self._connection, self._stream, self._republished = connection, stream, republished
        self._find, self._look = find, look
        self._next = after + 1  # the next entry to request
        self._end = self._announced = after  # the last entry when we looked; the last one that was announced since
        self._mark = LogMark()  # of the last entry that was taken
        self._window = ChunkWindow()
        self._asked: deque[tuple[int, asyncio.Task[StoredMessage | None]]] = deque()
        self._generation = -1  # of the connection when we looked last
        self._changed = asyncio.Event()
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._unlisten = self._connection.listen(self._changed.set)
        if self._republished:
            self._subscription = await self._connection.subscribe(self._republished, self._on_message)

    async def take(self) -> StoredMessage:
        """waits for: an entry     woken by: the server, a reconnect, the clock"""
        while True:
            self._changed.clear()
            is_blind = not self._republished and not self._asked and self._next > self._end
            if is_blind or self._generation != self._connection.generation:
                await self._look_again()
            # Example: entries 5 to 9 exist and three requests may be in flight. We ask for 5, 6 and 7, wait for 5, and
            # ask for 8 when it is taken. The answers to 6 and 7 may arrive first; they wait for their turn.
            while self._next <= self._announced and len(self._asked) < self._window.in_flight:
                self._asked.append((self._next, asyncio.create_task(self._ask(self._next))))
                self._next += 1
            if not self._asked:
                try:
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._changed.wait()
                except TimeoutError:  # a leader that died may have stored an entry without announcing it
                    self._generation = -1
                continue
            sequence, task = self._asked[0]
            await asyncio.wait((task,))  # cancelling us must not cancel the request
            self._asked.popleft()
            if (stored := task.result()) is not None:
                self._mark = LogMark(sequence=sequence, stored=stored.stored)
                return stored
            if sequence > self._end:  # announced, and not there: do not pass over what will be stored there
                await self._cancel_requests()
                self._next, self._generation = sequence, -1

    async def stop(self) -> None:
        self._unlisten()
        await self._cancel_requests()
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription, drain=False)

    async def _cancel_requests(self) -> None:
        tasks = [task for _, task in self._asked]
        self._asked.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look_again(self) -> None:
        generation = self._connection.generation
        state = await self._look(self._mark)
        if not self._asked:  # otherwise entries before first_seq are being requested, and turn out to be trimmed
            self._next = max(self._next, int(state["first_seq"]))
        self._end = self._announced = int(state["last_seq"])
        self._generation = generation

    async def _ask(self, sequence: int) -> StoredMessage | None:
        clock = asyncio.get_running_loop().time
        asked = clock()
        stored = await self._find(sequence)
        self._window.note(asked=asked, answered=clock())
        return stored

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        if headers.get("Nats-Stream") == self._stream:
            self._announced = max(self._announced, int(headers.get("Nats-Sequence", 0)))
        self._changed.set()
