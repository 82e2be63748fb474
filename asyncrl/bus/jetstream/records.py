"""Turns the entries of a log into records: decodes them, and joins messages in pieces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeVar

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.log_reader import LogReader
from asyncrl.bus.jetstream.ordered_consumer import Arrival, OrderedConsumer
from asyncrl.bus.jetstream.watch import StoredMessage, last_stored
from asyncrl.bus.pieces import Pieces
from asyncrl.bus.port import Record
from asyncrl.messages.topics import PIECES, Topic

M = TypeVar("M")


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
