"""Messages of a consumer that all workers share, lent to who waits for them: so many ahead as it wants.

1. Orders stand at the server only for who wants messages and takes them: ``stop``, a cancelled ``take`` and the end
   withdraw them. They name an inbox, and the server lends nothing to one that nobody listens at
   (test_a_worker_that_hears_nothing_for_a_while_orders_one_message_and_no_more).
2. What arrives all the same, because it was on its way, is given back at once; nothing is left to the ack timer of a
   server that thinks it lent it (test_a_message_that_crosses_the_withdrawal_is_given_back).
3. Never more is ordered and not taken than is wanted (test_no_more_is_ordered_than_is_wanted). More is ordered when
   that at least doubles what is on order: a worker that waits for long has one order, not one for each place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.bus.pull import USED_UP, Arrival, Wire, arrival, make_consumer, next_pause, order_body

logger = logging.getLogger(__name__)

GIVE_BACK = b"-NAK"
EXPIRES_SECONDS: Final = 10.0
"""The server ends an order after so long, with a word. No heartbeats: a worker that waits is to cost little."""
SILENCE_SECONDS: Final = EXPIRES_SECONDS + 2.5


class Lender:
    """``config``: the shared consumer's, which is made if it is not there. One ``take`` at a time."""

    def __init__(self, wire: Wire, *, stream: str, config: Mapping[str, Any]) -> None:
        self._wire, self._stream, self._config = wire, stream, dict(config)
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{config['name']}"
        self._wanted = 1
        self._changed = asyncio.Event()
        self._arrived: deque[Arrival] = deque()
        self._orders: _Orders | None = None
        self._generation = -1
        self._is_lost = True
        self._pause = 0.0

    async def start(self) -> None:
        await self._create_consumer()

    def want(self, count: int) -> None:
        """How many may be on order, or here and not taken; at least one for who waits in ``take``."""
        self._wanted = count
        self._changed.set()

    async def take(self) -> Arrival:
        """waits for: a message     woken by: the server, a reconnect, more that is wanted, silence"""
        try:
            while not self._arrived:
                self._changed.clear()
                await self._wire.online()
                if self._is_lost or self._generation != self._wire.generation:
                    await self._withdraw()
                    if self._arrived:
                        break
                    await self._create_consumer()
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
        """What was not taken goes back, and nothing more is lent until the next ``take``."""
        try:
            await self._withdraw(is_awaited=False)
        finally:
            while self._arrived:
                await _give_back(self._wire, self._arrived.popleft())

    def _look(self, orders: _Orders) -> None:
        if orders.was_heard:
            self._pause, orders.was_heard = 0.0, False
        if orders.problem:
            logger.debug("%s: makes its consumer anew: %s", self._stream, orders.problem)
            self._is_lost = True

    async def _listening(self) -> _Orders:
        orders = _Orders(self._wire, self._subject, self._arrived, self._changed)
        try:
            await orders.listen()
        except BaseException:
            await orders.withdraw()
            raise
        return orders

    async def _withdraw(self, *, is_awaited: bool = True) -> None:
        """``is_awaited``: what is still on its way is taken, and otherwise given back."""
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.is_awaited = is_awaited
            try:
                await orders.withdraw()
            finally:
                orders.is_awaited = False

    async def _create_consumer(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it brought anything: do not spin
        self._pause = next_pause(self._pause)
        generation = self._wire.generation
        await make_consumer(self._wire, self._stream, self._config)
        self._generation, self._is_lost = generation, False


class _Orders:
    """Those that name one inbox.

    problem     why the consumer must be made anew; "" if it need not
    was_heard   the consumer is there: it sent something
    is_awaited  what comes is taken
    """

    def __init__(self, wire: Wire, subject: str, arrived: deque[Arrival], changed: asyncio.Event) -> None:
        self._wire, self._subject, self._arrived, self._changed = wire, subject, arrived, changed
        self._open = 0  # messages they may still bring
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
        """Until that, or silence where something was due."""
        try:
            async with asyncio.timeout(self._due - time.monotonic()):
                await changed.wait()
        except TimeoutError:
            self.problem = "no answer"

    async def withdraw(self) -> None:
        """What is on its way arrives before this returns."""
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
            self._open = max(0, self._open - 1)
            item = arrival(message, generation=self._wire.generation)
            if not self.is_awaited:
                await _give_back(self._wire, item)
                return
            self._arrived.append(item)
        else:
            self._open = max(0, self._open - int(headers.get("Nats-Pending-Messages", self._open)))
            if status not in USED_UP:
                self.problem = f"{status} {headers.get('Description', '')}"
        self._changed.set()


async def _give_back(wire: Wire, item: Arrival) -> None:
    await wire.send(item.reply, GIVE_BACK, reply="")
