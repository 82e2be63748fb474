"""A lease on JetStream: a key that holds one message, the holder's, which dies unless it is stored again.

taken     stored where there is none (expected revision 0): one round trip when it is free
kept      stored over the message before, every third of its life
released  purged, up to our own revision, then told to who waits: the second round trip
lost      dead after LEASE_SECONDS, or somebody else's by now

Of those who wait one is told that it came free, and tries; the others sleep on, or a fleet would try all at once at
every release. Each tries by itself after LEASE_SECONDS, when a holder that died has lost it; no state of a waiter is on
the server (benchmarks/fleet.py counts the messages).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, Final

from asyncrl.bus.answers import Refused
from asyncrl.bus.connection import Connection
from asyncrl.bus.layout import Layout
from asyncrl.errors import BusError
from asyncrl.topics import Topic

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 5.0

_WRONG_REVISION: Final = {10071, 10164}
_LEAVE_SECONDS: Final = 1.0
"""How long who leaves waits for the server, before the lease is left to die."""
_EXPIRY_SECONDS: Final = 0.25
"""How much later than promised the server may remove what is dead."""
_WAITING: Final = "waiting"
"""NATS gives a message to one of a queue group."""


class Lease:
    """``stream``: the one of ``Lease.TOPIC``. ``take``, then ``release``, once."""

    TOPIC: ClassVar[Topic[str]] = Topic("leases", "state", str, seconds_to_live=LEASE_SECONDS)
    """Its values are the holders' names, as they are: `nats kv watch` shows who loads."""

    def __init__(self, connection: Connection, layout: Layout, *, stream: str, name: str, holder: str) -> None:
        self._connection, self._stream, self._name = connection, stream, name
        self._subject = layout.subject(self.TOPIC, name)
        self._freed = layout.freed(name)
        self._holder = holder.encode()
        self._seconds = self.TOPIC.seconds_to_live
        self._revision = 0  # of our message; 0 when it is not ours
        self._news = asyncio.Event()  # of who waits: it may be free
        self._releasing = asyncio.Event()
        self._keeping: asyncio.Future[None] | None = None

    async def take(self) -> None:
        """waits for: the lease     woken by: its release, a reconnect, the clock"""
        if not await self._try():
            await self._wait()
        self._keeping = asyncio.ensure_future(self._keep())

    async def release(self) -> None:
        """At once if the server is there; it is never waited for long."""
        self._releasing.set()
        try:
            if self._keeping is not None:
                await asyncio.wait((self._keeping,), timeout=_LEAVE_SECONDS)
                self._keeping.cancel()
        finally:
            await self._free()

    async def _wait(self) -> None:
        unlisten: Callable[[], None] = self._connection.listen(self._news.set)
        subscription = await self._connection.subscribe(self._freed, self._on_message, queue=_WAITING)
        try:
            while not await self._try():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds + _EXPIRY_SECONDS):
                        await self._news.wait()
                self._news.clear()
        except BaseException:  # what we were told is for another who waits
            await self._connection.send(self._freed, b"", reply="")
            raise
        finally:
            unlisten()
            await self._connection.unsubscribe(subscription, drain=False)

    async def _on_message(self, message: Any) -> None:
        self._news.set()

    async def _try(self) -> bool:
        """Whether it is ours now. A cancellation waits for the answer, so that what is ours is given back."""
        storing = asyncio.ensure_future(self._store())
        try:
            await asyncio.wait((storing,))
        except asyncio.CancelledError:
            await asyncio.wait((storing,), timeout=_LEAVE_SECONDS)
            storing.cancel()
            await self._free()
            raise
        return storing.result()

    async def _store(self) -> bool:
        """Make it ours, or ours for longer. False: it is somebody else's, or died."""
        headers = {
            "Nats-Expected-Stream": self._stream,
            "Nats-Expected-Last-Subject-Sequence": str(self._revision),
            "Nats-Msg-Id": uuid.uuid4().hex,  # asked again by the connection, it is stored once
        }
        found = (await self._connection.store(self._subject, self._holder, headers=headers)).found
        if "error" not in found:
            self._revision = int(found["seq"])
            return True
        if found["error"].get("err_code") not in _WRONG_REVISION:
            raise Refused(f"lease {self._name}", found["error"])
        self._revision = 0
        return False

    async def _keep(self) -> None:
        """waits for: the time to store it again     woken by: release"""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds / 3):
                        await self._releasing.wait()
                        return
                if not await self._store():
                    logger.warning("lease %s: ran out while it was held; somebody else may hold it now", self._name)
                    return
        except BusError as error:
            logger.warning("lease %s: cannot be kept: %s", self._name, error)

    async def _free(self) -> None:
        if not self._revision:
            return
        body = {"filter": self._subject, "seq": self._revision + 1}  # what came after ours is not ours to remove
        self._revision = 0
        with contextlib.suppress(BusError, TimeoutError):  # then it dies
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._connection.api(f"STREAM.PURGE.{self._stream}", body)
                await self._connection.send(self._freed, b"", reply="")
