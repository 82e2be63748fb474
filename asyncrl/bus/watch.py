"""One key's state on JetStream as it changes. A watch keeps nothing on the server but a subscription.

The stream of a state tells every message it has stored on a subject beside it (``republish``), with its sequence. Who
watches listens there first and then asks the stream's leader for the present value: what was stored before the
question is in the answer, what is stored after it is told, and the sequences say which is newer. It asks again after a
reconnect, and when it heard nothing for REFRESH_SECONDS: a leader that dies may have stored what it did not tell.

Not a consumer: a server takes a thousand of them (JetStream error 10026), each has to be made and to beat, and a fleet
has several watches a worker (benchmarks/fleet.py).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.bus.answers import Refused
from asyncrl.bus.pull import Wire

REFRESH_SECONDS: Final = 30.0
_NO_MESSAGE: Final = 10037


@dataclass(frozen=True, slots=True)
class Stored:
    """What the stream holds under the key."""

    sequence: int
    data: bytes
    headers: Mapping[str, str]
    subject: str = ""


class Watch:
    """``subject``: under which the stream stores the state;  ``told``: where it tells so."""

    def __init__(self, wire: Wire, *, stream: str, subject: str, told: str) -> None:
        self._wire, self._stream, self._subject, self._told = wire, stream, subject, told
        self._changed = asyncio.Event()
        self._newest: Stored | None = None
        self._seen = 0
        self._generation = -1  # of the connection when we asked last
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._subscription = await self._wire.subscribe(self._told, self._on_message)
        self._unlisten = self._wire.listen(self._changed.set)

    async def take(self) -> Stored:
        """The newest that was not taken yet.  waits for: a change    woken by: the server, a reconnect, the clock"""
        while True:
            self._changed.clear()
            if (newest := self._newest) is not None:
                self._newest = None
                return newest
            await self._wire.online()
            if self._generation != self._wire.generation:
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
            await self._wire.unsubscribe(self._subscription, drain=False)

    async def _ask(self) -> None:
        generation = self._wire.generation
        if (stored := await last_stored(self._wire, stream=self._stream, subject=self._subject)) is not None:
            self._hear(stored)
        self._generation = generation

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        self._hear(Stored(int(headers.get("Nats-Sequence", 0)), message.data, headers))

    def _hear(self, stored: Stored) -> None:
        if stored.sequence > self._seen:
            self._seen, self._newest = stored.sequence, stored
            self._changed.set()


async def last_stored(wire: Wire, *, stream: str, subject: str) -> Stored | None:
    """The last message under a subject, as the stream's leader has it; other servers of a cluster may be behind."""
    return await leaders_message(wire, stream, {"last_by_subj": subject})


async def leaders_message(wire: Wire, stream: str, which: Mapping[str, Any]) -> Stored | None:
    """``which``: {"last_by_subj": SUBJECT} or {"seq": SEQUENCE}."""
    try:
        found = (await wire.api(f"STREAM.MSG.GET.{stream}", which))["message"]
    except Refused as refused:
        if refused.code != _NO_MESSAGE:
            raise
        return None
    data, headers = (base64.b64decode(found.get(name) or "") for name in ("data", "hdrs"))
    return Stored(int(found["seq"]), data, _parsed(headers), subject=str(found["subject"]))


def _parsed(headers: bytes) -> dict[str, str]:
    """Of a stored message: a line "NATS/1.0", then one "NAME: VALUE" each."""
    lines = headers.decode().split("\r\n")[1:]
    return {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
