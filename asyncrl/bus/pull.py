"""What one JetStream consumer delivers, one message after another, whatever happens to server and connection meanwhile.

A pull is a standing order: at most so many messages and bytes, within so many seconds, with a heartbeat while there is
none. When the order is used up the next one is placed, only once everything that arrived was taken: a reader that does
not read holds back the server and fills no memory. The consumer is made anew when the connection was lost, when the
server says it is gone, when heartbeats stay away or when a message is missing; ``create`` says from where it goes on.
A consumer that others share is lender.py's.
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
"""So long it takes to notice that the server of a cluster is gone that had the consumer, when it is not our own."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 2.0
_MAKING_SECONDS: Final = 60.0
"""How long making a consumer is tried."""
USED_UP: Final = ("408", "404")  # the order's time is over; nothing there
_TOO_BIG: Final = "Message Size Exceeds MaxBytes"


class Wire(Protocol):
    """What a pull needs of the connection."""

    @property
    def generation(self) -> int:
        """Rises with every reconnect."""
        ...

    async def online(self) -> None:
        """Returns while connected. Raises BusError when the connection is over for good."""
        ...

    async def api(
        self, verb: str, body: Mapping[str, Any] | None = None, *, patience: float = _MAKING_SECONDS
    ) -> dict[str, Any]:
        """Raises Unanswered when a server that is there does not answer for ``patience`` seconds."""
        ...

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        """May be lost."""
        ...

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]]) -> Any:
        """``on_message`` is awaited for one message after the other."""
        ...

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        """``drain``: what is on the way still arrives."""
        ...

    def inbox(self) -> str: ...

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` at every reconnect and at the end; what is returned ends that."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message. ``reply`` is where to ack it; monotonic ``time`` and ``generation`` say when it came."""

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


def arrival(message: Any, *, generation: int) -> Arrival:
    """Reply is $JS.ACK.[domain.account.]stream.consumer.attempt.sequence.consumer_sequence.time.pending[.random]."""
    tokens = message.reply.split(".")
    consumer, attempt, sequence, consumer_sequence = tokens[3:7] if len(tokens) == 9 else tokens[5:9]
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
    )


async def make_consumer(
    wire: Wire, stream: str, config: Mapping[str, Any], *, patience: float = _MAKING_SECONDS
) -> None:
    filtered = f".{config['filter_subject']}" if "filter_subject" in config else ""
    verb, body = f"CONSUMER.CREATE.{stream}.{config['name']}{filtered}", {"stream_name": stream, "config": config}
    await wire.api(verb, body, patience=patience)


def next_pause(pause: float) -> float:
    """How long to wait before a consumer that was lost again is made again."""
    return min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LAST_PAUSE_SECONDS)


def order_body(*, batch: int, seconds: float = 0.0, max_bytes: int = 0) -> bytes:
    """``seconds``: when it ends, without heartbeats; 0 is a reader's order."""
    order = {"batch": batch, "expires": int((seconds or _EXPIRES_SECONDS) * 1e9)}
    if not seconds:
        order["idle_heartbeat"] = int(_HEARTBEAT_SECONDS * 1e9)
    if max_bytes:
        order["max_bytes"] = max_bytes
    return json.dumps(order).encode()


class Pull:
    """``create(last)`` is the consumer's configuration, to go on after stream sequence ``last`` (0 at first)."""

    def __init__(
        self, wire: Wire, *, stream: str, create: Callable[[int], dict[str, Any]], batch: int, max_bytes: int = 0
    ) -> None:
        self._wire, self._stream, self._create = wire, stream, create
        self._batch, self._max_bytes = batch, max_bytes
        self._inbox = wire.inbox()
        self._arrived: deque[Arrival] = deque()
        self._changed = asyncio.Event()
        self._config: dict[str, Any] = {}
        self._generation = -1
        self._is_lost = True
        self._last = 0
        self._last_consumer_sequence = 0
        self._order = 0
        self._open = 0  # messages the standing order may still bring
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

    def newest(self) -> Arrival | None:
        """The last of what arrived; the others are dropped."""
        newest = self._arrived.pop() if self._arrived else None
        self._arrived.clear()
        return newest

    async def stop(self) -> None:
        self._unlisten()
        if self._subscription is not None:
            await self._wire.unsubscribe(self._subscription, drain=False)
            if self._config:
                gone = f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._config['name']}"
                await self._wire.send(gone, b"", reply=f"{self._inbox}.gone")

    async def _create_consumer(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it brought anything: do not spin
        self._pause = next_pause(self._pause)
        # From here on what the consumer so far may still bring is dropped: the new one starts behind ``last``.
        self._is_lost = True
        generation = self._wire.generation
        config = await self._made_consumer()
        self._config, self._generation, self._is_lost = config, generation, False
        self._last_consumer_sequence = 0
        self._open = 0

    async def _made_consumer(self) -> dict[str, Any]:
        """Its configuration. A cluster may give it to a server that has just died: the next name goes to another."""
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
            self._open = 0  # cancelled on the way: two orders are better than none
            raise

    async def _on_message(self, message: Any) -> None:
        status = (message.headers or {}).get("Status")
        if status is None or not message.subject.startswith(self._inbox):
            self._on_arrival(arrival(message, generation=self._wire.generation))
        elif message.subject == f"{self._inbox}.{self._order}":
            self._on_status(status, str(message.headers.get("Description", "")))
        self._changed.set()

    def _on_arrival(self, item: Arrival) -> None:
        if item.consumer != self._config.get("name") or self._is_lost:
            return  # of a consumer given up; the present one brings it again
        if item.consumer_sequence != self._last_consumer_sequence + 1:
            self._lose("a message is missing")
            return
        self._last_consumer_sequence = item.consumer_sequence
        self._last = item.sequence
        self._open = max(0, self._open - 1)
        self._pause = 0.0
        self._arrived.append(item)

    def _on_status(self, status: str, description: str) -> None:
        if status == "100":  # heartbeat
            self._pause = 0.0
            return
        if description == _TOO_BIG and self._open == self._batch:
            self._max_bytes *= 2  # stored when the server took larger messages
        self._open = 0
        if status not in USED_UP and description != _TOO_BIG:
            self._lose(f"{status} {description}")

    def _lose(self, reason: str) -> None:
        logger.debug("%s: makes its consumer anew: %s", self._stream, reason)
        self._is_lost = True
        self._open = 0
