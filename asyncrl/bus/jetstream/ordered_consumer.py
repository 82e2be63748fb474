"""Delivers the messages of one JetStream consumer in order, across server restarts and reconnects.

A pull request asks for up to N messages and bytes within some seconds, with heartbeats while no message comes. The next
request is sent only after everything that arrived was taken, so a slow reader holds back the server instead of filling
memory. The consumer is recreated when the connection is lost, the server reports it gone, heartbeats stop or a message
is missing. ``create`` decides where the new consumer continues. For a shared consumer see pull_consumer.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

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


class Wire(Protocol):
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
    wire: Wire, stream: str, config: Mapping[str, Any], *, patience: float = _MAKING_SECONDS
) -> None:
    filtered = f".{config['filter_subject']}" if "filter_subject" in config else ""
    verb, body = f"CONSUMER.CREATE.{stream}.{config['name']}{filtered}", {"stream_name": stream, "config": config}
    await wire.api(verb, body, patience=patience)


def next_pause(pause: float) -> float:
    """Return the next back-off before recreating a consumer that was lost again."""
    return min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LAST_PAUSE_SECONDS)


def order_body(*, batch: int, seconds: float = 0.0, max_bytes: int = 0) -> bytes:
    """Body of a pull request. ``seconds``: its expiry, without heartbeats; 0: a reader's default expiry, with them."""
    order = {"batch": batch, "expires": int((seconds or _EXPIRES_SECONDS) * 1e9)}
    if not seconds:
        order["idle_heartbeat"] = int(_HEARTBEAT_SECONDS * 1e9)
    if max_bytes:
        order["max_bytes"] = max_bytes
    return json.dumps(order).encode()


class OrderedConsumer:
    """``create(last)`` returns the configuration of a consumer that continues after stream sequence ``last`` (first 0).

    ``verify`` is called before each creation.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        stream: str,
        create: Callable[[int], dict[str, Any]],
        batch: int,
        max_bytes: int = 0,
        verify: Verify | None = None,
    ) -> None:
        self._verify = verify
        self._wire, self._stream, self._create = wire, stream, create
        self._batch, self._max_bytes = batch, max_bytes
        self._inbox = wire.inbox()
        self._arrived: deque[Arrival] = deque()
        self._changed = asyncio.Event()
        self._config: dict[str, Any] = {}
        self._generation = -1
        self._is_lost = True
        self._last = self._last_stored = 0
        self._last_consumer_sequence = 0
        self._order = 0
        self._open = 0  # messages that the pull request may still deliver
        self._pause = 0.0
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._subscription = await self._wire.subscribe(f"{self._inbox}.*", self._on_message)
        self._unlisten = self._wire.listen(self._changed.set)
        await self._create_consumer()

    async def take(self) -> Arrival:
        """waits for: a message     woken by: the server, a reconnect, silence"""
        while True:
            self._changed.clear()
            if self._arrived:
                return self._arrived.popleft()
            await self._wire.online()
            if self._is_lost or self._generation != self._wire.generation:
                await self._create_consumer()
            if not self._open:
                await self._place_order()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self._lose("no heartbeat")

    async def stop(self) -> None:
        self._unlisten()
        if self._subscription is not None:
            await self._wire.unsubscribe(self._subscription, drain=False)
            if self._config:
                gone = f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._config['name']}"
                await self._wire.send(gone, b"", reply=f"{self._inbox}.gone")

    async def _create_consumer(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it delivered a message: do not spin
        self._pause = next_pause(self._pause)
        # From here on messages of the old consumer are dropped: the new one starts after ``last``.
        self._is_lost = True
        generation = self._wire.generation
        if self._verify is not None:
            await self._verify(self._last, self._last_stored)
        config = await self._made_consumer()
        self._config, self._generation, self._is_lost = config, generation, False
        self._last_consumer_sequence = 0
        self._open = 0

    async def _made_consumer(self) -> dict[str, Any]:
        """Create a consumer and return its configuration. A cluster may place it on a server that has just died; a
        consumer with a new name goes to another server."""
        since, pause = time.monotonic(), 0.0
        while True:
            config = self._create(self._last)
            try:
                await make_consumer(self._wire, self._stream, config, patience=0.0)
                return config
            except Unanswered:
                if time.monotonic() - since > _MAKING_SECONDS:
                    raise
            pause = next_pause(pause)
            await asyncio.sleep(pause)

    async def _place_order(self) -> None:
        self._order += 1
        self._open = self._batch
        order = order_body(batch=self._batch, max_bytes=self._max_bytes)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config['name']}"
        try:
            await self._wire.send(subject, order, reply=f"{self._inbox}.{self._order}")
        except BaseException:
            self._open = 0  # cancelled while sending; two pull requests are better than none
            raise

    async def _on_message(self, message: Any) -> None:
        status = (message.headers or {}).get("Status")
        if status is None or not message.subject.startswith(self._inbox):
            if (item := arrival(message, generation=self._wire.generation)) is not None:
                self._on_arrival(item)
        elif message.subject == f"{self._inbox}.{self._order}":
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
