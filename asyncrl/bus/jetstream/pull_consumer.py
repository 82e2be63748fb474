"""Pulls messages from the consumer that all workers share, and prefetches up to a given count.

1. Pull requests are pending only while messages are wanted and taken. ``stop``, a cancelled ``take`` and the end
   withdraw them by unsubscribing their inbox: the server delivers nothing to an inbox without a listener
   (test_a_worker_that_hears_nothing_for_a_while_orders_one_message_and_no_more).
2. Messages in flight during the withdrawal are returned at once instead of waiting for the server's ack timer
   (test_a_message_that_crosses_the_withdrawal_is_given_back).
3. Never more messages are requested or prefetched than wanted (test_no_more_is_ordered_than_is_wanted). More are
   requested only if that at least doubles the pending count, so a worker that waits long has one request instead of one
   per slot.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from asyncrl.bus.jetstream.ordered_consumer import (
    USED_UP,
    Arrival,
    Wire,
    arrival,
    next_pause,
    order_body,
)

logger = logging.getLogger(__name__)

GIVE_BACK = b"-NAK"
GiveBack = Callable[[Arrival], Awaitable[None]]
EXPIRES_SECONDS: Final = 10.0
"""Expiry of pull requests, which the server reports. No heartbeats are requested, so a waiting worker costs little."""
SILENCE_SECONDS: Final = EXPIRES_SECONDS + 2.5


class PullConsumer:
    """Pulls messages with ``take``. Only one ``take`` may run at a time."""

    def __init__(
        self,
        wire: Wire,
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
        self._wire, self._stream, self._ready = wire, stream, ready
        self._give_back = give_back or functools.partial(_nak, wire)
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._wanted = 1
        self._changed = asyncio.Event()
        self._arrived: deque[Arrival] = deque()
        self._orders: _Orders | None = None
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
                await self._wire.online()
                if self._is_lost or self._generation != self._wire.generation:
                    await self._withdraw()
                    if self._arrived:
                        break
                    await self._until_ready()
                if self._orders is None:
                    self._orders = await self._listening()
                await self._orders.top_up(max(1, self._wanted))
                await self._orders.until(self._changed)
                self._look(self._orders)
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

    def _look(self, orders: _Orders) -> None:
        if orders.was_heard:
            self._pause, orders.was_heard = 0.0, False
        if orders.problem:
            logger.debug("%s: looks for its consumer again: %s", self._stream, orders.problem)
            self._is_lost = True

    async def _listening(self) -> _Orders:
        orders = _Orders(self._wire, self._subject, self._arrived, self._changed, self._give_back)
        try:
            await orders.listen()
        except BaseException:
            await orders.withdraw()
            raise
        return orders

    async def _withdraw(self, *, is_awaited: bool = True) -> None:
        """Withdraw the pull requests. Messages in flight are kept if ``is_awaited``, otherwise returned."""
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.is_awaited = is_awaited
            try:
                await orders.withdraw()
            finally:
                orders.is_awaited = False

    async def _until_ready(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it delivered a message: do not spin
        self._pause = next_pause(self._pause)
        generation = self._wire.generation
        await self._ready()
        self._generation, self._is_lost = generation, False


class _Orders:
    """Pull requests that share one inbox.

    problem     why to look for the consumer again; "" if there is no reason
    was_heard   whether the consumer sent something
    is_awaited  whether arriving messages are kept
    """

    def __init__(
        self, wire: Wire, subject: str, arrived: deque[Arrival], changed: asyncio.Event, give_back: GiveBack
    ) -> None:
        self._wire, self._subject, self._arrived, self._changed = wire, subject, arrived, changed
        self._give_back = give_back
        self._open = 0  # messages that the requests may still deliver
        self._due = 0.0
        self._inbox = wire.inbox()
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None
        self.problem = ""
        self.was_heard = False
        self.is_awaited = True

    async def listen(self) -> None:
        self._unlisten = self._wire.listen(self._changed.set)
        self._subscription = await self._wire.subscribe(self._inbox, self._on_message)

    async def top_up(self, wanted: int) -> None:
        missing = wanted - self._open
        if missing > self._open:
            if not self._open:
                self._due = time.monotonic() + SILENCE_SECONDS
            self._open += missing
            order = order_body(batch=missing, seconds=EXPIRES_SECONDS)
            await self._wire.send(self._subject, order, reply=self._inbox)

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
            await self._wire.unsubscribe(subscription, drain=self._open > 0)

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        self.was_heard = True
        self._due = time.monotonic() + SILENCE_SECONDS
        if status is None:
            if (item := arrival(message, generation=self._wire.generation)) is None:
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


async def _nak(wire: Wire, item: Arrival) -> None:
    await wire.send(item.reply, GIVE_BACK, reply="")
