"""Work messages on loan by one connection: taken, kept, acked, given back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

from asyncrl.bus.answers import IS_GONE, Refused
from asyncrl.bus.connection import Connection
from asyncrl.bus.handover import opened
from asyncrl.bus.layout import Layout
from asyncrl.bus.lender import GIVE_BACK, Lender
from asyncrl.bus.pull import Arrival
from asyncrl.errors import Unanswered
from asyncrl.protocols import Delivery
from asyncrl.topics import Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")

_WORD_SECONDS: Final = 5.0
"""How long a server may take for a word about a loan: after an election the new leader may not know of it."""


class Loans(AsyncIterator[Delivery[M]], Generic[M]):
    """See ``protocols.Deliveries``."""

    def __init__(self, connection: Connection, topic: Topic[M], layout: Layout, *, stream: str) -> None:
        self._connection, self._topic, self._layout = connection, topic, layout
        self._lender = Lender(connection, stream=stream, config=layout.workers())
        self._held: list[Loan[M]] = []

    async def start(self) -> None:
        await self._lender.start()

    async def __anext__(self) -> Delivery[M]:
        loan = Loan(self._connection, await self._lender.take(), self._topic, self._layout)
        if loan.attempt > 1:
            logger.info("%s %s: comes for the %d. time", self._topic.name, loan.key, loan.attempt)
        self._held = [one for one in self._held if one.is_ours()] + [loan]
        return loan

    def want(self, count: int) -> None:
        self._lender.want(count)

    async def stop(self) -> None:
        await self._lender.stop()

    async def end(self) -> None:
        """All that is on loan goes back."""
        try:
            await self._lender.stop()
        finally:
            for loan in self._held:
                await loan.give_back()


class Loan(Generic[M]):
    """A message on loan by one connection.

    A late nak would take it from whoever has it by then: the server does not tell them apart. A server that was killed
    may have forgotten that it lent the message, and the next leader in a cluster may never have heard of it; it leaves
    an ack for it unanswered, so the message is deleted instead.
    One word at a time: a keep that overtakes a retry would have the message wait for ack_seconds
    (test_a_retry_is_not_undone_by_a_keep_in_the_same_moment).
    """

    def __init__(self, connection: Connection, item: Arrival, topic: Topic[M], layout: Layout) -> None:
        self._connection, self._item = connection, item
        self._stream = layout.stream(topic)
        self._ack_seconds = layout.ack_seconds
        self._until = item.time + layout.ack_seconds
        self._content = opened(item.data, topic)
        self._speaking = asyncio.Lock()
        self.key = layout.key(topic, item.subject)
        self.attempt = item.attempt

    @property
    def message(self) -> M | None:
        return self._content.message

    @property
    def problem(self) -> str:
        return self._content.problem

    def is_ours(self) -> bool:
        return time.monotonic() < self._until

    async def ack(self) -> None:
        """Also when somebody else holds it by now: it was done."""
        async with self._speaking:
            try:
                await self._ask(b"+ACK")
            except Unanswered:
                await self._delete()
            self._until = 0.0

    async def retry(self, *, delay: float = 0.0) -> None:
        async with self._speaking:
            if self.is_ours():
                await self._ask_or_tell(GIVE_BACK + b' {"delay": %d}' % int(delay * 1e9))
                self._until = 0.0

    async def keep(self) -> None:
        async with self._speaking:
            if self.is_ours():
                kept = time.monotonic()
                await self._ask_or_tell(b"+WPI")
                self._until = kept + self._ack_seconds

    async def give_back(self) -> None:
        """At once and without an answer: who leaves waits for nobody. Lost, it comes again after ack_seconds."""
        if self.is_ours():
            self._until = 0.0
            await self._tell(GIVE_BACK)

    async def _ask(self, word: bytes) -> None:
        await self._connection.request(self._item.reply, word, only_in=self._item.generation, patience=_WORD_SECONDS)

    async def _tell(self, word: bytes) -> None:
        await self._connection.send(self._item.reply, word, reply="")

    async def _ask_or_tell(self, word: bytes) -> None:
        try:
            await self._ask(word)
        except Unanswered:
            await self._tell(word)  # a server that knows it hears it; one that does not will deliver it again

    async def _delete(self) -> None:
        body = {"seq": self._item.sequence, "no_erase": True}
        try:
            await self._connection.api(f"STREAM.MSG.DELETE.{self._stream}", body)
        except Refused as refused:
            if not refused.description.endswith(IS_GONE):
                raise
