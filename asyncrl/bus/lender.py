"""Messages of a consumer that all workers share, lent one at a time to who waits for one.

1. An order stands at the server only while somebody waits in ``take``: who stops waiting, or waited in vain, withdraws
   it. Each order has an inbox of its own, and the server lends nothing to an inbox that nobody listens at
   (test_a_worker_that_hears_nothing_for_a_while_orders_one_message_and_no_more).
2. What arrives all the same, because it was on its way, is given back at once; nothing is left to the ack timer of a
   server that thinks it lent it (test_a_message_that_crosses_the_withdrawal_is_given_back).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.bus.pull import SILENCE_SECONDS, USED_UP, Arrival, Wire, arrival, make_consumer, next_pause, order_body

logger = logging.getLogger(__name__)

GIVE_BACK = b"-NAK"


class Lender:
    """``config``: the shared consumer's, which is made if it is not there. One ``take`` at a time."""

    def __init__(self, wire: Wire, *, stream: str, config: Mapping[str, Any]) -> None:
        self._wire, self._stream, self._config = wire, stream, dict(config)
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{config['name']}"
        self._generation = -1
        self._is_lost = True
        self._pause = 0.0

    async def start(self) -> None:
        await self._create_consumer()

    async def take(self) -> Arrival:
        """waits for: a message     woken by: the server, a reconnect, silence"""
        while True:
            await self._wire.online()
            if self._is_lost or self._generation != self._wire.generation:
                await self._create_consumer()
            order = _Order(self._wire)
            item = await order.outcome(self._subject)
            if order.was_heard:
                self._pause = 0.0
            if item is not None:
                return item
            if order.problem:
                logger.debug("%s: makes its consumer anew: %s", self._stream, order.problem)
                self._is_lost = True

    async def _create_consumer(self) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)  # lost again before it brought anything: do not spin
        self._pause = next_pause(self._pause)
        generation = self._wire.generation
        await make_consumer(self._wire, self._stream, self._config)
        self._generation, self._is_lost = generation, False


class _Order:
    """One message asked of the server, and who waits for it.

    problem    why the consumer must be made anew; "" if it need not
    was_heard  the consumer is there: it sent something
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._generation = wire.generation
        self._changed = asyncio.Event()
        self._is_awaited = True
        self._is_over = False
        self._item: Arrival | None = None
        self._subscription: Any = None
        self._unlisten: Callable[[], None] = lambda: None
        self.problem = ""
        self.was_heard = False

    async def outcome(self, subject: str) -> Arrival | None:
        """The message; None when the server said no, was gone for a while or was silent too long.

        Who is cancelled waits no more: what came or still comes is given back.
        """
        try:
            await self._wait(subject)
            await self._leave()
        except BaseException:
            self._is_awaited = False
            if self._item is not None:
                await self._give_back(self._item)
            await self._leave()
            raise
        self._is_awaited = False
        return self._item

    async def _wait(self, subject: str) -> None:
        inbox = self._wire.inbox()
        self._unlisten = self._wire.listen(self._changed.set)
        self._subscription = await self._wire.subscribe(inbox, self._on_message)
        await self._wire.send(subject, order_body(batch=1), reply=inbox)
        try:
            while not self._is_over and self._generation == self._wire.generation:
                self._changed.clear()
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._changed.wait()
                await self._wire.online()
        except TimeoutError:
            self.problem = "no heartbeat"

    async def _leave(self) -> None:
        """Withdraw the order, unless it was fulfilled; what was on its way arrives before this returns."""
        self._unlisten()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._wire.unsubscribe(subscription, drain=self._item is None)

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            item = arrival(message, generation=self._wire.generation)
            if self._is_awaited:
                self._item, self._is_over, self.was_heard = item, True, True
            else:
                await self._give_back(item)
        elif status == "100":  # heartbeat
            self.was_heard = True
        else:
            self._is_over = True
            if status not in USED_UP:
                self.problem = f"{status} {headers.get('Description', '')}"
        self._changed.set()

    async def _give_back(self, item: Arrival) -> None:
        await self._wire.send(item.reply, GIVE_BACK, reply="")
