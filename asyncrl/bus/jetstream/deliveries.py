"""Work messages in flight to one connection: delivered, kept, acked, or given back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Generic, TypeVar

from asyncrl.bus.encoding import Opened, opened
from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.consumers import GIVE_BACK, Arrival, PullConsumer
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.jetstream.streams import remove_message
from asyncrl.bus.port import Delivery
from asyncrl.errors import Unanswered
from asyncrl.messages.signing import Signatures
from asyncrl.messages.topics import Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")

_REPLY_SECONDS: Final = 5.0
"""Timeout of an ack, nak or keep. After an election the new leader may not know the delivery."""
_SURE_SHARE: Final = 0.8
"""Share of ack_seconds during which a nak is sent. The server's timer starts when it sends a message, which arrives
noticeably later on a busy machine. The server would apply a late nak to the next consumer's delivery."""


class JetStreamDeliveries(AsyncIterator[Delivery[M]], Generic[M]):
    """See ``Deliveries in bus/port.py``."""

    def __init__(
        self,
        connection: Connection,
        topic: Topic[M],
        layout: Layout,
        *,
        ready: Callable[[], Awaitable[None]],
        signatures: Signatures,
    ) -> None:
        self._connection, self._topic, self._layout = connection, topic, layout
        self._signatures = signatures
        self._consumer = PullConsumer(
            connection,
            stream=layout.stream(topic),
            name=WORKERS,
            ready=ready,
            give_back=self._give_back,
        )
        self._held: list[JetStreamDelivery[M]] = []
        self._tell_unread: Callable[[Delivery[M]], Awaitable[None]] | None = None

    async def start(self) -> None:
        await self._consumer.start()

    async def __anext__(self) -> Delivery[M]:
        delivery = self._delivery(await self._consumer.take())
        if delivery.attempt > 1:
            logger.info("%s %s: delivery attempt %d", self._topic.name, delivery.key, delivery.attempt)
        self._held = [one for one in self._held if one.is_ours()] + [delivery]
        return delivery

    def want(self, count: int) -> None:
        self._consumer.want(count)

    def on_unread(self, tell: Callable[[Delivery[M]], Awaitable[None]]) -> None:
        self._tell_unread = tell

    async def stop(self) -> None:
        await self._consumer.stop()

    async def end(self) -> None:
        """Stop the consumer and return all unacknowledged messages."""
        try:
            await self._consumer.stop()
        finally:
            for delivery in self._held:
                await delivery.give_back()

    def _delivery(self, item: Arrival) -> JetStreamDelivery[M]:
        key = self._layout.key(self._topic, item.subject)
        content = opened(item.data, self._topic, key=key, signatures=self._signatures)
        return JetStreamDelivery(self._connection, item, self._topic, self._layout, content)

    async def _give_back(self, item: Arrival) -> None:
        """Return a message that arrived but was not taken."""
        try:
            if self._tell_unread is not None:
                await self._tell_unread(self._delivery(item))
        finally:
            await self._connection.send(item.reply, GIVE_BACK, reply="")


class JetStreamDelivery(Generic[M]):
    """A message in flight to one connection.

    No keep is sent after ack_seconds, and no nak from shortly before that: the server redelivers the message anyway.
    A killed server may have forgotten the delivery, and a cluster's new leader may never have known it. An ack then
    gets no reply, so the message is deleted instead.
    Acks, naks and keeps are serialised: a keep that overtakes a retry would delay redelivery by ack_seconds
    (test_a_retry_is_not_undone_by_a_keep_in_the_same_moment).
    """

    def __init__(
        self, connection: Connection, item: Arrival, topic: Topic[M], layout: Layout, content: Opened[M]
    ) -> None:
        self._connection, self._item = connection, item
        self._stream = layout.stream(topic)
        self._ack_seconds = layout.ack_seconds
        self._until = item.time + layout.ack_seconds
        self._content = content
        self._lock = asyncio.Lock()
        self.key = layout.key(topic, item.subject)
        self.attempt = item.attempt

    @property
    def message(self) -> M | None:
        return self._content.message

    @property
    def problem(self) -> str:
        return self._content.problem

    def is_ours(self) -> bool:
        return time.monotonic() < self._until

    def is_surely_ours(self) -> bool:
        """Whether the server also still considers the message ours."""
        return time.monotonic() < self._until - (1 - _SURE_SHARE) * self._ack_seconds

    async def ack(self) -> None:
        """Acknowledge, even if the message was redelivered in between: the work is done."""
        async with self._lock:
            try:
                await self._request(b"+ACK")
            except Unanswered:
                await remove_message(self._connection, self._stream, self._item.sequence)
            self._until = 0.0

    async def retry(self, *, delay: float = 0.0) -> None:
        async with self._lock:
            if self.is_surely_ours():
                await self._request_or_send(GIVE_BACK + b' {"delay": %d}' % int(delay * 1e9))
                self._until = 0.0

    async def keep(self) -> None:
        async with self._lock:
            if self.is_ours():
                kept = time.monotonic()
                await self._request_or_send(b"+WPI")
                self._until = kept + self._ack_seconds

    async def give_back(self) -> None:
        """Return the message without waiting for a reply. If the nak is lost, redelivery follows after ack_seconds."""
        if self.is_surely_ours():
            self._until = 0.0
            await self._send(GIVE_BACK)

    async def _request(self, ack: bytes) -> None:
        await self._connection.request(self._item.reply, ack, only_in=self._item.generation, patience=_REPLY_SECONDS)

    async def _send(self, ack: bytes) -> None:
        await self._connection.send(self._item.reply, ack, reply="")

    async def _request_or_send(self, ack: bytes) -> None:
        try:
            await self._request(ack)
        except Unanswered:
            await self._send(ack)  # the server may know the delivery; if not, it redelivers anyway
