"""Consumers of JetStream streams.

Both kinds send pull requests, so a slow reader holds back the server instead of filling memory, and look for their
consumer again when the connection was lost, the server reports the consumer gone, or nothing is heard for too long.

    OrderedConsumer  the entries of a log, in order, each once: a consumer of our own, made again where it was lost
    PullConsumer     work: the durable consumer that all workers share, which the learner makes and workers wait for
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrl.bus.jetstream.connection import Connection, Refused
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.errors import Unanswered

logger = logging.getLogger(__name__)

_EXPIRES_SECONDS: Final = 30.0
_HEARTBEAT_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 2.5 * _HEARTBEAT_SECONDS
"""Time to detect the loss of a cluster's server that hosts the consumer but is not the one we are connected to."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 2.0
_MAKING_SECONDS: Final = 60.0
"""How long creating a consumer is retried."""
USED_UP: Final = ("408", "404")  # pull request expired; no messages
_TOO_BIG: Final = "Message Size Exceeds MaxBytes"


Verify = Callable[[int, int], Awaitable[None]]
"""Called with the sequence of the last message read and when it was stored. Raises if the stream no longer has it."""
GIVE_BACK: Final = b"-NAK"
PULL_EXPIRES_SECONDS: Final = 10.0
"""Expiry of pull requests, which the server reports. No heartbeats are requested, so a waiting worker costs little."""
PULL_SILENCE_SECONDS: Final = PULL_EXPIRES_SECONDS + 2.5
_NO_CONSUMER: Final = (10014, 10059)  # no such consumer; no such stream


class Transport(Protocol):
    """The part of a connection that a consumer needs."""

    @property
    def generation(self) -> int:
        """Number that rises with every reconnect."""
        ...

    async def online(self) -> None:
        """Wait until connected. Raises BusError when the connection is closed permanently."""
        ...

    async def api(
        self, verb: str, body: Mapping[str, Any] | None = None, *, patience: float = _MAKING_SECONDS
    ) -> dict[str, Any]:
        """Raises Unanswered if a running server does not reply within ``patience`` seconds."""
        ...

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        """Send a message, which may be lost."""
        ...

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]]) -> Any:
        """``on_message`` is awaited for each message in turn."""
        ...

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        """With ``drain``, messages in flight still arrive."""
        ...

    def inbox(self) -> str: ...

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` at every reconnect and on close. Return a function that ends this."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message.

    reply             subject for its ack
    time, generation  monotonic time and connection generation of its arrival
    stored            when the server stored it, in nanoseconds of the server's clock
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reply: str
    consumer: str
    attempt: int
    sequence: int
    consumer_sequence: int
    time: float
    generation: int
    stored: int = 0


def arrival(message: Any, *, generation: int) -> Arrival | None:
    """Parse a message; None if no consumer delivered it.

    Reply is $JS.ACK.[domain.account.]stream.consumer.attempt.sequence.consumer_sequence.time.pending[.random].
    """
    tokens = message.reply.split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        return None
    consumer, attempt, sequence, consumer_sequence, stored = tokens[3:8] if len(tokens) == 9 else tokens[5:10]
    return Arrival(
        subject=message.subject,
        data=message.data,
        headers=message.headers or {},
        reply=message.reply,
        consumer=consumer,
        attempt=int(attempt),
        sequence=int(sequence),
        consumer_sequence=int(consumer_sequence),
        time=time.monotonic(),
        generation=generation,
        stored=int(stored),
    )


async def make_consumer(
    transport: Transport, stream: str, config: Mapping[str, Any], *, patience: float = _MAKING_SECONDS
) -> None:
    filtered = f".{config['filter_subject']}" if "filter_subject" in config else ""
    verb, body = f"CONSUMER.CREATE.{stream}.{config['name']}{filtered}", {"stream_name": stream, "config": config}
    await transport.api(verb, body, patience=patience)


def next_pause(pause: float) -> float:
    """Return the next back-off before recreating a consumer that was lost again."""
    return min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LAST_PAUSE_SECONDS)


def pull_request(*, batch: int, seconds: float = 0.0, max_bytes: int = 0) -> bytes:
    """Body of a pull request. ``seconds``: its expiry, without heartbeats; 0: a reader's default expiry, with them."""
    body = {"batch": batch, "expires": int((seconds or _EXPIRES_SECONDS) * 1e9)}
    if not seconds:
        body["idle_heartbeat"] = int(_HEARTBEAT_SECONDS * 1e9)
    if max_bytes:
        body["max_bytes"] = max_bytes
    return json.dumps(body).encode()


class OrderedConsumer:
    """Delivers the messages of a stream in order, across server restarts and reconnects.

    The next pull request is sent only after everything that arrived was taken. The consumer is recreated when the
    connection is lost, the server reports it gone, heartbeats stop or a message is missing.

    create  returns the configuration of a consumer that continues after stream sequence ``last`` (first 0)
    verify  called before each creation
    """

    def __init__(
        self,
        transport: Transport,
        *,
        stream: str,
        create: Callable[[int], dict[str, Any]],
        batch: int,
        max_bytes: int = 0,
        verify: Verify | None = None,
    ) -> None:
        self._verify = verify
        self._transport, self._stream, self._create = transport, stream, create
        self._batch, self._max_bytes = batch, max_bytes
        self._inbox = transport.inbox()
        self._arrived: deque[Arrival] = deque()
        self._changed = asyncio.Event()
        self._config: dict[str, Any] = {}
        self._generation = -1
        self._is_lost = True
        self._last = self._last_stored = 0
        self._last_consumer_sequence = 0
        self._request_number = 0
        self._open = 0  # messages that the pull request may still deliver
        self._pause = 0.0
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._subscription = await self._transport.subscribe(f"{self._inbox}.*", self._on_message)
        self._unlisten = self._transport.listen(self._changed.set)
        await self._create_consumer()

    async def take(self) -> Arrival:
        """waits for: a message     woken by: the server, a reconnect, silence"""
        while True:
            self._changed.clear()
            if self._arrived:
                return self._arrived.popleft()
            await self._transport.online()
            if self._is_lost or self._generation != self._transport.generation:
                await self._create_consumer()
            if not self._open:
                await self._request_more()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self._lose("no heartbeat")

    async def stop(self) -> None:
        self._unlisten()
        if self._subscription is not None:
            await self._transport.unsubscribe(self._subscription, drain=False)
            if self._config:
                gone = f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._config['name']}"
                await self._transport.send(gone, b"", reply=f"{self._inbox}.gone")

    async def _create_consumer(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it delivered a message: do not spin
        self._pause = next_pause(self._pause)
        # From here on messages of the old consumer are dropped: the new one starts after ``last``.
        self._is_lost = True
        generation = self._transport.generation
        if self._verify is not None:
            await self._verify(self._last, self._last_stored)
        config = await self._create_with_retries()
        self._config, self._generation, self._is_lost = config, generation, False
        self._last_consumer_sequence = 0
        self._open = 0

    async def _create_with_retries(self) -> dict[str, Any]:
        """Create a consumer and return its configuration. A cluster may place it on a server that has just died; a
        consumer with a new name goes to another server."""
        since, pause = time.monotonic(), 0.0
        while True:
            config = self._create(self._last)
            try:
                await make_consumer(self._transport, self._stream, config, patience=0.0)
                return config
            except Unanswered:
                if time.monotonic() - since > _MAKING_SECONDS:
                    raise
            pause = next_pause(pause)
            await asyncio.sleep(pause)

    async def _request_more(self) -> None:
        self._request_number += 1
        self._open = self._batch
        body = pull_request(batch=self._batch, max_bytes=self._max_bytes)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config['name']}"
        try:
            await self._transport.send(subject, body, reply=f"{self._inbox}.{self._request_number}")
        except BaseException:
            self._open = 0  # cancelled while sending; two pull requests are better than none
            raise

    async def _on_message(self, message: Any) -> None:
        status = (message.headers or {}).get("Status")
        if status is None or not message.subject.startswith(self._inbox):
            if (item := arrival(message, generation=self._transport.generation)) is not None:
                self._on_arrival(item)
        elif message.subject == f"{self._inbox}.{self._request_number}":
            self._on_status(status, str(message.headers.get("Description", "")))
        self._changed.set()

    def _on_arrival(self, item: Arrival) -> None:
        if item.consumer != self._config.get("name") or self._is_lost:
            return  # from an old consumer; the current one delivers the message again
        if item.consumer_sequence != self._last_consumer_sequence + 1:
            self._lose("a message is missing")
            return
        self._last_consumer_sequence = item.consumer_sequence
        self._last, self._last_stored = item.sequence, item.stored
        self._open = max(0, self._open - 1)
        self._pause = 0.0
        self._arrived.append(item)

    def _on_status(self, status: str, description: str) -> None:
        if status == "100":  # heartbeat
            self._pause = 0.0
            return
        if description == _TOO_BIG and self._open == self._batch:
            self._max_bytes *= 2  # the message was stored while the server allowed larger ones
        self._open = 0
        if status not in USED_UP and description != _TOO_BIG:
            self._lose(f"{status} {description}")

    def _lose(self, reason: str) -> None:
        logger.debug("%s: recreating the consumer: %s", self._stream, reason)
        self._is_lost = True
        self._open = 0


GiveBack = Callable[[Arrival], Awaitable[None]]


class PullConsumer:
    """Pulls messages with ``take``. Only one ``take`` may run at a time.

    1. Pull requests are pending only while messages are wanted and taken. ``stop``, a cancelled ``take`` and the end
       withdraw them by unsubscribing their inbox: the server delivers nothing to an inbox without a listener
       (test_silent_worker_requests_one_message_and_no_more).
    2. Messages in flight during the withdrawal are returned at once instead of waiting for the server's ack timer
       (test_message_that_crosses_a_withdrawal_is_returned).
    3. Never more messages are requested or prefetched than wanted (test_no_more_is_requested_than_wanted). More are
       requested only if that at least doubles the pending count, so a worker that waits long has one request instead of
       one per slot.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        stream: str,
        name: str,
        ready: Callable[[], Awaitable[None]],
        give_back: GiveBack | None = None,
    ) -> None:
        """
        ready      returns once the shared consumer exists
        give_back  gives a message that was not taken back to the bus
        """
        self._transport, self._stream, self._ready = transport, stream, ready
        self._give_back = give_back or functools.partial(_nak, transport)
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
                await self._transport.online()
                if self._is_lost or self._generation != self._transport.generation:
                    await self._withdraw()
                    if self._arrived:
                        break
                    await self._until_ready()
                if self._requests is None:
                    self._requests = await self._listening()
                await self._requests.top_up(max(1, self._wanted))
                await self._requests.until(self._changed)
                self._look(self._requests)
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
                await self._give_back(self._arrived.popleft())

    def _look(self, requests: _PullRequests) -> None:
        if requests.was_heard:
            self._pause, requests.was_heard = 0.0, False
        if requests.problem:
            logger.debug("%s: looks for its consumer again: %s", self._stream, requests.problem)
            self._is_lost = True

    async def _listening(self) -> _PullRequests:
        requests = _PullRequests(self._transport, self._subject, self._arrived, self._changed, self._give_back)
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
        self._pause = next_pause(self._pause)
        generation = self._transport.generation
        await self._ready()
        self._generation, self._is_lost = generation, False


class _PullRequests:
    """Pull requests that share one inbox.

    problem     why to look for the consumer again; "" if there is no reason
    was_heard   whether the consumer sent something
    is_awaited  whether arriving messages are kept
    """

    def __init__(
        self, transport: Transport, subject: str, arrived: deque[Arrival], changed: asyncio.Event, give_back: GiveBack
    ) -> None:
        self._transport, self._subject, self._arrived, self._changed = transport, subject, arrived, changed
        self._give_back = give_back
        self._open = 0  # messages that the requests may still deliver
        self._due = 0.0
        self._inbox = transport.inbox()
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None
        self.problem = ""
        self.was_heard = False
        self.is_awaited = True

    async def listen(self) -> None:
        self._unlisten = self._transport.listen(self._changed.set)
        self._subscription = await self._transport.subscribe(self._inbox, self._on_message)

    async def top_up(self, wanted: int) -> None:
        missing = wanted - self._open
        if missing > self._open:
            if not self._open:
                self._due = time.monotonic() + PULL_SILENCE_SECONDS
            self._open += missing
            body = pull_request(batch=missing, seconds=PULL_EXPIRES_SECONDS)
            await self._transport.send(self._subject, body, reply=self._inbox)

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
            await self._transport.unsubscribe(subscription, drain=self._open > 0)

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        self.was_heard = True
        self._due = time.monotonic() + PULL_SILENCE_SECONDS
        if status is None:
            if (item := arrival(message, generation=self._transport.generation)) is None:
                return
            self._open = max(0, self._open - 1)
            if not self.is_awaited:
                await self._give_back(item)
                return
            self._arrived.append(item)
        else:
            self._open = max(0, self._open - int(headers.get("Nats-Pending-Messages", self._open)))
            if status not in USED_UP:
                self.problem = f"{status} {headers.get('Description', '')}"
        self._changed.set()


async def _nak(transport: Transport, item: Arrival) -> None:
    await transport.send(item.reply, GIVE_BACK, reply="")


async def shared_consumer(connection: Connection, layout: Layout, stream: str, *, role: str) -> None:
    """Return once the consumer that all workers share exists on the stream of a work topic.

    Workers may not create it, because then they could also change it: with another filter it delivers nothing, and the
    run stops.

    waits for: the learner
    """
    if role != "rollout-worker":
        await make_consumer(connection, stream, layout.workers())
        return
    pause = _FIRST_PAUSE_SECONDS
    while not await consumer_exists(connection, stream):
        await asyncio.sleep(pause)
        if pause == _LAST_PAUSE_SECONDS:
            logger.warning("%s: waiting for the learner to create the workers' consumer", stream)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS + 0.1)


async def consumer_exists(connection: Connection, stream: str) -> bool:
    try:
        await connection.api(f"CONSUMER.INFO.{stream}.{WORKERS}")
    except Refused as refused:
        if refused.code not in _NO_CONSUMER:
            raise
        return False
    return True
