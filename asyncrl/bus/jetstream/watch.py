"""Watches the state of one key on JetStream. A watch costs the server only a subscription.

A state's stream republishes every stored message, with its sequence, on a second subject. A watch first subscribes to
that subject, then asks the stream's leader for the current value. The reply covers earlier changes, later ones are
republished, and sequences tell which is newer. A watch asks again after a reconnect, and after REFRESH_SECONDS without
a message: a leader that dies may have stored a message without republishing it.

A watch does not use a consumer. A server allows only a thousand of them (JetStream error 10026), each must be created
and needs heartbeats, and a fleet has several watches per worker (benchmarks/fleet.py).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from asyncrl.bus.jetstream.connection import Refused
from asyncrl.bus.jetstream.consumers import Transport

REFRESH_SECONDS: Final = 30.0
_NO_MESSAGE: Final = 10037


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as stored in the stream."""

    sequence: int
    data: bytes
    headers: Mapping[str, str]
    subject: str = ""
    stored: int = 0


class Watch:
    """``subject``: where the stream stores the state;  ``republished``: where it republishes the state."""

    def __init__(self, transport: Transport, *, stream: str, subject: str, republished: str) -> None:
        self._transport, self._stream, self._subject, self._republished = transport, stream, subject, republished
        self._changed = asyncio.Event()
        self._newest: StoredMessage | None = None
        self._seen = 0
        self._generation = -1  # of the connection at our last request
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._subscription = await self._transport.subscribe(self._republished, self._on_message)
        self._unlisten = self._transport.listen(self._changed.set)

    async def take(self) -> StoredMessage:
        """Return the newest value not taken yet.

        waits for: a change     woken by: the server, a reconnect, the clock
        """
        while True:
            self._changed.clear()
            if (newest := self._newest) is not None:
                self._newest = None
                return newest
            await self._transport.online()
            if self._generation != self._transport.generation:
                await self._ask()
                continue
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self._generation = -1

    async def stop(self) -> None:
        self._unlisten()
        if self._subscription is not None:
            await self._transport.unsubscribe(self._subscription, drain=False)

    async def _ask(self) -> None:
        generation, seen = self._transport.generation, self._seen
        stored = await last_stored(self._transport, stream=self._stream, subject=self._subject)
        last = stored.sequence if stored is not None else 0
        if self._seen == seen and last < seen:
            self._seen = 0  # a resumed run made the stream again, or it went back to an earlier state
        if stored is not None and stored.sequence > self._seen:
            self._hear(stored)
        self._generation = generation

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        # The server names the source. A client may have a reply with another stream's message sent to this subject
        # (test_nobody_is_told_what_was_not_stored).
        if (headers.get("Nats-Stream"), headers.get("Nats-Subject")) == (self._stream, self._subject):
            stored = _nanoseconds(headers["Nats-Time-Stamp"]) if "Nats-Time-Stamp" in headers else 0
            self._hear(StoredMessage(int(headers.get("Nats-Sequence", 0)), message.data, headers, stored=stored))

    def _hear(self, stored: StoredMessage) -> None:
        if stored.sequence > self._seen:
            self._seen, self._newest = stored.sequence, stored
            self._changed.set()
        elif stored.sequence < self._seen:  # arrived late, or the stream was recreated: ask its leader
            self._generation = -1
            self._changed.set()


async def last_stored(transport: Transport, *, stream: str, subject: str) -> StoredMessage | None:
    """Return the last message under a subject, from the stream's leader; other servers of a cluster may lag."""
    return await leaders_message(transport, stream, {"last_by_subj": subject})


async def leaders_message(transport: Transport, stream: str, which: Mapping[str, Any]) -> StoredMessage | None:
    """Return a message from the stream's leader. ``which``: {"last_by_subj": SUBJECT} or {"seq": SEQUENCE}."""
    try:
        found = (await transport.api(f"STREAM.MSG.GET.{stream}", which))["message"]
    except Refused as refused:
        if refused.code != _NO_MESSAGE:
            raise
        return None
    data, headers = (base64.b64decode(found.get(name) or "") for name in ("data", "hdrs"))
    sequence, stored = int(found["seq"]), _nanoseconds(str(found["time"]))
    return StoredMessage(sequence, data, _parsed(headers), subject=str(found["subject"]), stored=stored)


def _nanoseconds(time: str) -> int:
    """Parse a time such as 2026-11-23T05:30:22.742607002Z to nanoseconds since 1970."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    whole = int(datetime.fromisoformat(f"{seconds}+00:00").timestamp())
    return whole * 10**9 + int(fraction.ljust(9, "0") or 0)


def _parsed(headers: bytes) -> dict[str, str]:
    """Parse the headers of a stored message: a line "NATS/1.0", then lines "NAME: VALUE"."""
    lines = headers.decode().split("\r\n")[1:]
    return {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
