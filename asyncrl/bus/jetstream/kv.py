"""States and leases: keys whose last message counts. Both are key-value buckets for the `nats kv` command.

Watching a state costs the server only a subscription. The state's stream republishes every stored message, with its
sequence, on a second subject. A watch first subscribes to that subject, then asks the stream's leader for the current
value. The reply covers earlier changes, later ones are republished, and sequences tell which is newer:

    leader's reply: sequence 7    republished: 7, 8    ->    7 once, then 8

A watch asks again after a reconnect, and after REFRESH_SECONDS without a message: a leader that dies may have stored a
message without republishing it. It uses no consumer: a server allows only a thousand of them (JetStream error 10026),
each needs heartbeats, and a fleet has several watches per worker (benchmarks/fleet.py).

A lease is a key with one message, the holder's record, which expires unless it is renewed:

    acquired  stored if there is no message (expected revision 0) or over a release mark (its revision). Takes one round
              trip if the lease is free, three if it was released within the last second without our noticing
    renewed   overwritten after every third of its time to live
    released  a mark that expires after a second is stored over our message, then announced to one waiter (a queue
              group; otherwise a whole fleet would try at once) with its revision
    lost      expired after LEASE_SECONDS; another process may hold it by now. Each waiter also tries after that time

No message is purged: permission to purge a part of a stream includes permission to purge all of it. Leases of the
learner and of workers have different subjects, so a worker cannot take a lease of the learner.

nats-py's KeyValue (2.16) passes the contract suites in 85 lines less, but makes a consumer per watch, which a worker
may not (test_a_whole_run_works_with_each_process_in_its_role hangs) and a server allows a thousand times only. A lease
by its create and update lets a holder that was cut off disturb the next one
(test_holder_that_was_cut_off_does_not_disturb_the_next_one).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, Final

from asyncrl.bus.jetstream.connection import Connection, Refused
from asyncrl.bus.jetstream.layout import GONE_SOON, REMOVED, Layout, is_removed, token
from asyncrl.bus.jetstream.streams import StoredMessage, last_stored, nanoseconds
from asyncrl.errors import BusError
from asyncrl.messages.topics import Topic

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 30.0
LEASE_SECONDS: Final = 5.0

_WRONG_REVISION: Final = {10071, 10164}
_LEAVE_SECONDS: Final = 1.0
"""Timeout of a release. A lease that is not released in time expires."""
_EXPIRY_SECONDS: Final = 0.25
"""How late the server may remove an expired message."""
_WAITING: Final = "waiting"
"""Queue group of the waiters: NATS delivers each message to one member."""


class Watch:
    """``subject``: where the stream stores the state;  ``republished``: where it republishes the state."""

    def __init__(self, connection: Connection, *, stream: str, subject: str, republished: str) -> None:
        self._connection, self._stream, self._subject, self._republished = connection, stream, subject, republished
        self._changed = asyncio.Event()
        self._newest: StoredMessage | None = None
        self._seen = 0
        self._generation = -1  # of the connection at our last request
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._subscription = await self._connection.subscribe(self._republished, self._on_message)
        self._unlisten = self._connection.listen(self._changed.set)

    async def take(self) -> StoredMessage:
        """Return the newest value not taken yet.

        waits for: a change     woken by: the server, a reconnect, the clock
        """
        while True:
            self._changed.clear()
            if (newest := self._newest) is not None:
                self._newest = None
                return newest
            await self._connection.online()
            if self._generation != self._connection.generation:
                await self._ask_leader()
                continue
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self._generation = -1

    async def stop(self) -> None:
        self._unlisten()
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription, drain=False)

    async def _ask_leader(self) -> None:
        generation, seen = self._connection.generation, self._seen
        stored = await last_stored(self._connection, stream=self._stream, subject=self._subject)
        last = stored.sequence if stored is not None else 0
        if self._seen == seen and last < seen:
            self._seen = 0  # a resumed run made the stream again, or it went back to an earlier state
        if stored is not None and stored.sequence > self._seen:
            self._update(stored)
        self._generation = generation

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        # The server names the source. A client may have a reply with another stream's message sent to this subject
        # (test_nobody_is_told_what_was_not_stored).
        if (headers.get("Nats-Stream"), headers.get("Nats-Subject")) == (self._stream, self._subject):
            stored = nanoseconds(headers["Nats-Time-Stamp"]) if "Nats-Time-Stamp" in headers else 0
            self._update(StoredMessage(int(headers.get("Nats-Sequence", 0)), message.data, headers, stored=stored))

    def _update(self, stored: StoredMessage) -> None:
        if stored.sequence > self._seen:
            self._seen, self._newest = stored.sequence, stored
            self._changed.set()
        elif stored.sequence < self._seen:  # arrived late, or the stream was recreated: ask its leader
            self._generation = -1
            self._changed.set()


class Lease:
    """Call ``take``, then ``release``, once each. ``stream``: the stream of ``Lease.TOPIC``."""

    TOPIC: ClassVar[Topic[str]] = Topic("leases", "state", str, seconds_to_live=LEASE_SECONDS)
    """A value is the holder's name in plain text: `nats kv watch` shows which worker is loading."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        *,
        stream: str,
        name: str,
        holder: str,
        role: str,
    ) -> None:
        self._connection, self._stream, self._name = connection, stream, name
        self._subject = lease_prefix(layout, role=role) + token(name)
        self._freed = layout.freed(name, role=role)
        self._holder = holder.encode()
        self._seconds = self.TOPIC.seconds_to_live
        self._revision = 0  # of our message; 0 if we do not hold the lease
        self._released = 0  # revision of the announced release mark; 0 if there is none
        self._may_be_free = asyncio.Event()  # for a waiter: the lease may be free
        self._releasing = asyncio.Event()
        self._renewing: asyncio.Future[None] | None = None

    async def take(self) -> None:
        """waits for: the lease     woken by: its release, a reconnect, the clock"""
        if not await self._try_to_acquire():
            await self._wait()
        self._renewing = asyncio.ensure_future(self._renew())

    async def release(self) -> None:
        """Release the lease if the server answers in time; otherwise it expires."""
        self._releasing.set()
        try:
            if self._renewing is not None:
                await asyncio.wait((self._renewing,), timeout=_LEAVE_SECONDS)
                self._renewing.cancel()
        finally:
            await self._free()

    async def _wait(self) -> None:
        unlisten: Callable[[], None] = self._connection.listen(self._may_be_free.set)
        subscription = await self._connection.subscribe(self._freed, self._on_message, queue=_WAITING)
        try:
            while not await self._try_to_acquire():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds + _EXPIRY_SECONDS):
                        await self._may_be_free.wait()
                self._may_be_free.clear()
        except BaseException:  # pass the announcement on to another waiter
            await self._connection.send(self._freed, b"%d" % self._released, reply="")
            raise
        finally:
            unlisten()
            await self._connection.unsubscribe(subscription, drain=False)

    async def _on_message(self, message: Any) -> None:
        self._released = int(message.data) if message.data.isdigit() else 0
        self._may_be_free.set()

    async def _try_to_acquire(self) -> bool:
        """Try to acquire the lease. A cancellation waits for the reply, so that an acquired lease is released."""
        storing = asyncio.ensure_future(self._store_where_free())
        try:
            await asyncio.wait((storing,))
        except asyncio.CancelledError:
            await asyncio.wait((storing,), timeout=_LEAVE_SECONDS)
            storing.cancel()
            await self._free()
            raise
        return storing.result()

    async def _store_where_free(self) -> bool:
        released, self._released = self._released, 0
        if await self._store(released):
            return True
        last = await last_stored(self._connection, stream=self._stream, subject=self._subject)
        if last is not None and not is_removed(last.headers):
            return False
        return await self._store(0 if last is None else last.sequence)

    async def _store(self, revision: int) -> bool:
        """Acquire or renew the lease. Return False if another process holds it, or our hold expired."""
        self._revision = await self._stored(self._holder, over=revision)
        return self._revision > 0

    async def _stored(self, data: bytes, *, over: int, **headers: str) -> int:
        """Store over the message of revision ``over``. Return the new revision; 0 if another message is the last."""
        headers |= {
            "Nats-Expected-Stream": self._stream,
            "Nats-Expected-Last-Subject-Sequence": str(over),
            "Nats-Msg-Id": uuid.uuid4().hex,  # stored once even if the connection repeats the request
        }
        found = (await self._connection.store(self._subject, data, headers=headers)).found
        if "error" not in found:
            return int(found["seq"])
        if found["error"].get("err_code") not in _WRONG_REVISION:
            raise Refused(f"lease {self._name}", found["error"])
        return 0

    async def _renew(self) -> None:
        """waits for: the time to renew     woken by: release"""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds / 3):
                        await self._releasing.wait()
                        return
                if not await self._store(self._revision) and not await self._store_where_free():
                    logger.warning("lease %s: expired while held; another process may hold it now", self._name)
                    return
        except BusError as error:
            logger.warning("lease %s: cannot be renewed: %s", self._name, error)

    async def _free(self) -> None:
        if not self._revision:
            return
        ours, self._revision = self._revision, 0
        with contextlib.suppress(BusError, TimeoutError):  # the lease then expires
            async with asyncio.timeout(_LEAVE_SECONDS):
                if released := await self._stored(b"", over=ours, **(REMOVED | GONE_SOON)):
                    await self._connection.send(self._freed, b"%d" % released, reply="")


def lease_prefix(layout: Layout, *, role: str) -> str:
    """Prefix of a lease's name in its subject; each role has its own."""
    return f"{layout.prefix(Lease.TOPIC)}{role}."
