"""Work messages: the consumer that all workers share, and the messages in flight to one connection.

    PullConsumer         requests messages and keeps those that arrived; looks for the consumer again when the
                         connection was lost, the server reports the consumer gone, or nothing is heard for too long
    JetStreamDeliveries  decodes them, and returns those that were not acknowledged in the end
    JetStreamDelivery    one message: acknowledged, kept, or given back

The learner creates the shared consumer, and workers wait for it.

nats-py's pull subscription (2.16) would save 150 lines. A fetch that is cancelled leaves its request with the server:
messages go to nobody, and each costs an attempt (test_consumer_that_no_longer_waits_leaves_messages_to_others).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from asyncrl.bus.encoding import Opened, opened
from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.jetstream.streams import consumer_exists, remove_message
from asyncrl.bus.port import Delivery
from asyncrl.errors import Unanswered
from asyncrl.messages.topics import Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")

PULL_EXPIRES_SECONDS: Final = 10.0
"""Expiry of pull requests, which the server reports. No heartbeats are requested, so a waiting worker costs little."""
PULL_SILENCE_SECONDS: Final = PULL_EXPIRES_SECONDS + 2.5
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 2.0
_USED_UP: Final = ("408", "404")  # pull request expired; no messages
_REPLY_SECONDS: Final = 5.0
"""Timeout of an ack, nak or keep. After an election the new leader may not know the delivery."""
_SURE_SHARE: Final = 0.8
"""Share of ack_seconds during which a nak is sent. The server's timer starts when it sends a message, which arrives
noticeably later on a busy machine. The server would apply a late nak to the next consumer's delivery."""
_GIVE_BACK: Final = b"-NAK"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message that arrived.

    reply             subject for its ack
    time, generation  monotonic time and connection generation of its arrival
    """

    subject: str
    data: bytes
    reply: str
    attempt: int
    sequence: int
    time: float
    generation: int


def arrival(message: Any, *, generation: int) -> Arrival | None:
    """Parse a message; None if no consumer delivered it.

    Reply is $JS.ACK.[domain.account.]stream.consumer.attempt.sequence.consumer_sequence.time.pending[.random].
    """
    tokens = message.reply.split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        return None
    attempt, sequence = tokens[4:6] if len(tokens) == 9 else tokens[6:8]
    return Arrival(
        subject=message.subject,
        data=message.data,
        reply=message.reply,
        attempt=int(attempt),
        sequence=int(sequence),
        time=time.monotonic(),
        generation=generation,
    )


async def give_back(connection: Connection, item: Arrival) -> None:
    """Return a message that was not taken."""
    await connection.send(item.reply, _GIVE_BACK, reply="")


class PullConsumer:
    """Pulls messages with ``take``. Only one ``take`` may run at a time.

    1. Pull requests are pending only while messages are wanted and taken. ``stop``, a cancelled ``take`` and the end
       withdraw them by unsubscribing their inbox: the server delivers nothing to an inbox without a listener
       (test_silent_worker_requests_one_message_and_no_more).
    2. Messages in flight during the withdrawal, or sent shortly after it, are returned at once instead of waiting for
       the server's ack timer (test_message_that_crosses_a_withdrawal_is_returned,
       test_a_message_that_the_server_sends_after_a_drain_is_heard_and_nothing_is_left).
    3. Never more messages are requested or prefetched than wanted (test_no_more_is_requested_than_wanted). More are
       requested only if that at least doubles the pending count, so a worker that waits long has one request instead of
       one per slot.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        name: str,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        """ready: returns once the shared consumer exists"""
        self._connection, self._stream, self._ready = connection, stream, ready
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._wanted = 1
        self._changed = asyncio.Event()
        self._arrived: deque[Arrival] = deque()
        self._requests: _PullRequests | None = None
        self._generation = -1
        self._is_lost = True
        self._pause = 0.0

    async def start(self) -> None:
        await self._until_ready()

    def want(self, count: int) -> None:
        """Set how many messages may be requested or prefetched; at least one while ``take`` waits."""
        self._wanted = count
        self._changed.set()

    async def take(self) -> Arrival:
        """waits for: a message     woken by: the server, a reconnect, ``want``, silence"""
        try:
            while not self._arrived:
                self._changed.clear()
                await self._connection.online()
                if self._is_lost or self._generation != self._connection.generation:
                    await self._withdraw()
                    if self._arrived:
                        break
                    await self._until_ready()
                if self._requests is None:
                    self._requests = await self._listening()
                await self._requests.top_up(max(1, self._wanted))
                await self._requests.until(self._changed)
                self._note_answers(self._requests)
        except BaseException:
            await self.stop()
            raise
        return self._arrived.popleft()

    async def stop(self) -> None:
        """Return prefetched messages. Request no more until the next ``take``."""
        try:
            await self._withdraw(is_awaited=False)
        finally:
            while self._arrived:
                await give_back(self._connection, self._arrived.popleft())

    def _note_answers(self, requests: _PullRequests) -> None:
        if requests.has_answered:
            self._pause, requests.has_answered = 0.0, False
        if requests.problem:
            logger.debug("%s: looks for its consumer again: %s", self._stream, requests.problem)
            self._is_lost = True

    async def _listening(self) -> _PullRequests:
        requests = _PullRequests(self._connection, self._subject, self._arrived, self._changed)
        try:
            await requests.listen()
        except BaseException:
            await requests.withdraw()
            raise
        return requests

    async def _withdraw(self, *, is_awaited: bool = True) -> None:
        """Withdraw the pull requests. Messages in flight are kept if ``is_awaited``, otherwise returned."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.is_awaited = is_awaited
            try:
                await requests.withdraw()
            finally:
                requests.is_awaited = False

    async def _until_ready(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it delivered a message: do not spin
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LAST_PAUSE_SECONDS)
        generation = self._connection.generation
        await self._ready()
        self._generation, self._is_lost = generation, False


class _PullRequests:
    """Pull requests that share one inbox.

    problem       why to look for the consumer again; "" if there is no reason
    has_answered  whether the consumer sent something since the last look
    is_awaited    whether arriving messages are kept
    """

    def __init__(self, connection: Connection, subject: str, arrived: deque[Arrival], changed: asyncio.Event) -> None:
        self._connection, self._subject, self._arrived, self._changed = connection, subject, arrived, changed
        self._open = 0  # messages that the requests may still deliver
        self._due = 0.0
        self._inbox = connection.inbox()
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None
        self.problem = ""
        self.has_answered = False
        self.is_awaited = True

    async def listen(self) -> None:
        self._unlisten = self._connection.listen(self._changed.set)
        self._subscription = await self._connection.subscribe(self._inbox, self._on_message)

    async def top_up(self, wanted: int) -> None:
        missing = wanted - self._open
        if missing > self._open:
            if not self._open:
                self._due = time.monotonic() + PULL_SILENCE_SECONDS
            self._open += missing
            body = {"batch": missing, "expires": int(PULL_EXPIRES_SECONDS * 1e9)}
            await self._connection.send(self._subject, json.dumps(body).encode(), reply=self._inbox)

    async def until(self, changed: asyncio.Event) -> None:
        """Wait for ``changed``, or until the server has been silent for too long."""
        try:
            async with asyncio.timeout(self._due - time.monotonic()):
                await changed.wait()
        except TimeoutError:
            self.problem = "no answer"

    async def withdraw(self) -> None:
        """Unsubscribe. Messages in flight arrive before this returns."""
        self._unlisten()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.unsubscribe(subscription, drain=self._open > 0)

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        self.has_answered = True
        self._due = time.monotonic() + PULL_SILENCE_SECONDS
        if status is None:
            if (item := arrival(message, generation=self._connection.generation)) is None:
                return
            self._open = max(0, self._open - 1)
            if not self.is_awaited:
                await give_back(self._connection, item)
                return
            self._arrived.append(item)
        else:
            self._open = max(0, self._open - int(headers.get("Nats-Pending-Messages", self._open)))
            if status not in _USED_UP:
                self.problem = f"{status} {headers.get('Description', '')}"
        self._changed.set()


async def ensure_consumer(connection: Connection, layout: Layout, stream: str, *, role: str) -> None:
    """Return once the consumer that all workers share exists on the stream of a work topic.

    Workers may not create it, because then they could also change it: with another filter it delivers nothing, and the
    run stops.

    waits for: the learner
    """
    if role != "rollout-worker":
        body = {"stream_name": stream, "config": layout.workers()}
        await connection.api(f"CONSUMER.CREATE.{stream}.{WORKERS}", body)
        return
    pause = _FIRST_PAUSE_SECONDS
    while not await consumer_exists(connection, stream):
        await asyncio.sleep(pause)
        if pause == _LAST_PAUSE_SECONDS:
            logger.warning("%s: waiting for the learner to create the workers' consumer", stream)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS + 0.1)


class JetStreamDeliveries(AsyncIterator[Delivery[M]], Generic[M]):
    """See ``Deliveries in bus/port.py``."""

    def __init__(
        self,
        connection: Connection,
        topic: Topic[M],
        layout: Layout,
        *,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection, self._topic, self._layout = connection, topic, layout
        self._consumer = PullConsumer(
            connection,
            stream=layout.stream(topic),
            name=WORKERS,
            ready=ready,
        )
        self._held: list[JetStreamDelivery[M]] = []

    async def start(self) -> None:
        await self._consumer.start()

    async def __anext__(self) -> Delivery[M]:
        item = await self._consumer.take()
        key = self._layout.key(self._topic, item.subject)
        content = opened(item.data, self._topic, key=key)
        delivery = JetStreamDelivery(self._connection, item, self._topic, self._layout, content)
        if delivery.attempt > 1:
            logger.info("%s %s: delivery attempt %d", self._topic.name, delivery.key, delivery.attempt)
        self._held = [one for one in self._held if one.is_ours()] + [delivery]
        return delivery

    def want(self, count: int) -> None:
        self._consumer.want(count)

    async def stop(self) -> None:
        await self._consumer.stop()

    async def end(self) -> None:
        """Stop the consumer and return all unacknowledged messages."""
        try:
            await self._consumer.stop()
        finally:
            for delivery in self._held:
                await delivery.give_back()


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
        self.message, self.problem = content.message, content.problem
        self._lock = asyncio.Lock()
        self.key = layout.key(topic, item.subject)
        self.attempt = item.attempt

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
                await self._request_or_send(_GIVE_BACK + b' {"delay": %d}' % int(delay * 1e9))
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
            await self._send(_GIVE_BACK)

    async def _request(self, ack: bytes) -> None:
        await self._connection.request(self._item.reply, ack, only_in=self._item.generation, patience=_REPLY_SECONDS)

    async def _send(self, ack: bytes) -> None:
        await self._connection.send(self._item.reply, ack, reply="")

    async def _request_or_send(self, ack: bytes) -> None:
        try:
            await self._request(ack)
        except Unanswered:
            await self._send(ack)  # the server may know the delivery; if not, it redelivers anyway
