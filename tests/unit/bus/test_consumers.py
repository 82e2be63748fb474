"""A pull and a lender handle everything a server may send, in any order. The test plays the server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.bus.jetstream.consumers import OrderedConsumer, PullConsumer, make_consumer
from asyncrl.bus.jetstream.layout import reader
from asyncrl.errors import Unanswered


async def nothing() -> None:
    pass


class ScriptedTransport:
    """A connection without a server: the test plays the server, even while a consumer is being created."""

    def __init__(self) -> None:
        self.generation = 0
        self.consumers: list[dict[str, Any]] = []
        self.orders: list[str] = []
        self.batches: list[int] = []
        self.sent: list[tuple[str, bytes]] = []
        self.meanwhile: Callable[[], Awaitable[None]] = nothing
        self.leaving: Callable[[], Awaitable[None]] = nothing
        self.listening: dict[str, Callable[[Any], Awaitable[None]]] = {}
        self._inboxes = itertools.count(1)

    async def online(self) -> None:
        pass

    async def api(self, verb: str, body: Any = None, *, patience: float = 60.0) -> dict[str, Any]:
        await self.meanwhile()
        self.consumers.append(body["config"])
        return {}

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        if ".MSG.NEXT." in subject:
            self.orders.append(reply)
            self.batches.append(json.loads(data)["batch"])
        else:
            self.sent.append((subject, data))

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]]) -> Any:
        self.listening[subject] = on_message
        return subject

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        if drain:
            await self.leaving()
        del self.listening[subscription]

    def inbox(self) -> str:
        return f"inbox{next(self._inboxes)}"

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    async def ordered(self, count: int) -> None:
        while len(self.orders) < count:
            await asyncio.sleep(0)

    async def deliver(self, sequence: int, *, consumer: int, consumer_sequence: int, attempt: int = 1) -> None:
        """Deliver to the listener; a test has one at a time."""
        (on_message,) = self.listening.values()
        name = self.consumers[consumer]["name"]
        reply = f"$JS.ACK.s.{name}.{attempt}.{sequence}.{consumer_sequence}.0.0"
        await on_message(SimpleNamespace(subject="s.k", data=b"", headers=None, reply=reply))

    async def refuse(self, status: str, description: str, *, pending: int = 1) -> None:
        ((inbox, on_message),) = self.listening.items()
        headers = {"Status": status, "Description": description, "Nats-Pending-Messages": str(pending)}
        await on_message(SimpleNamespace(subject=inbox, data=b"", headers=headers, reply=""))


def ordered_consumer(transport: ScriptedTransport) -> OrderedConsumer:
    names = itertools.count()
    return OrderedConsumer(
        transport, stream="s", create=lambda last: reader(f"reader-{next(names)}", after=last), batch=10
    )


async def test_late_messages_of_a_replaced_consumer_are_not_read_twice() -> None:
    transport = ScriptedTransport()
    pull = ordered_consumer(transport)
    await pull.start()
    await transport.deliver(1, consumer=0, consumer_sequence=1)
    assert (await pull.take()).sequence == 1
    transport.generation += 1  # a reconnect that the consumer outlived
    transport.meanwhile = lambda: transport.deliver(2, consumer=0, consumer_sequence=2)
    waiting = asyncio.create_task(pull.take())
    while len(transport.consumers) < 2:
        await asyncio.sleep(0)
    assert transport.consumers[1]["opt_start_seq"] == 2
    await transport.deliver(2, consumer=1, consumer_sequence=1)
    await transport.deliver(3, consumer=1, consumer_sequence=2)
    assert [(await waiting).sequence, (await pull.take()).sequence] == [2, 3]


async def test_a_missing_message_is_read_again_from_a_new_consumer() -> None:
    transport = ScriptedTransport()
    pull = ordered_consumer(transport)
    await pull.start()
    await transport.deliver(1, consumer=0, consumer_sequence=1)
    await transport.deliver(3, consumer=0, consumer_sequence=3)  # 2 was dropped on the way
    assert (await pull.take()).sequence == 1
    waiting = asyncio.create_task(pull.take())
    while len(transport.consumers) < 2:
        await asyncio.sleep(0)
    assert transport.consumers[1]["opt_start_seq"] == 2
    await transport.deliver(2, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 2


async def test_consumer_placed_on_a_dead_server_is_created_under_another_name() -> None:
    transport = ScriptedTransport()

    async def nobody_answers() -> None:
        transport.meanwhile = nothing
        raise Unanswered("given to a server that has just died")

    pull = ordered_consumer(transport)
    transport.meanwhile = nobody_answers
    await pull.start()
    assert [consumer["name"] for consumer in transport.consumers] == ["reader-1"]
    await transport.deliver(1, consumer=0, consumer_sequence=1)
    assert (await pull.take()).sequence == 1


# -- a shared consumer -------------------------------------------------------------------------------------------------


def lender(transport: ScriptedTransport) -> PullConsumer:
    return PullConsumer(
        transport, stream="s", name="workers", ready=lambda: make_consumer(transport, "s", {"name": "workers"})
    )


def given_back(transport: ScriptedTransport) -> list[int]:
    """Stream sequences of the messages that were given back."""
    return [int(subject.split(".")[5]) for subject, word in transport.sent if word == b"-NAK"]


async def test_expired_pull_request_is_repeated_and_the_consumer_stays() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    for number in range(1, 4):
        await transport.ordered(number)
        await transport.refuse("408", "Request Timeout")
    await transport.ordered(4)
    await transport.deliver(1, consumer=0, consumer_sequence=1)
    assert (await waiting).sequence == 1
    assert len(transport.consumers) == 1
    await lent.stop()
    assert not transport.listening
    assert given_back(transport) == []


async def test_no_more_is_requested_than_wanted() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    lent.want(3)
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    await transport.deliver(1, consumer=0, consumer_sequence=1)
    assert (await waiting).sequence == 1
    lent.want(2)  # two are on order
    waiting = asyncio.create_task(lent.take())
    await asyncio.sleep(0)
    lent.want(5)
    await transport.ordered(2)
    lent.want(6)  # one more is not worth an order
    for sequence in range(2, 7):
        await transport.deliver(sequence, consumer=0, consumer_sequence=sequence)
    assert (await waiting).sequence == 2
    assert [(await lent.take()).sequence for _ in range(4)] == [3, 4, 5, 6]
    assert transport.batches == [3, 3]


async def test_consumer_that_waits_long_has_one_pull_request() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    lent.want(4)
    await transport.ordered(2)
    await transport.refuse("408", "Request Timeout", pending=1)  # three are still on order
    await transport.refuse("408", "Request Timeout", pending=3)
    await transport.ordered(3)
    assert transport.batches == [1, 3, 4]
    waiting.cancel()
    await asyncio.wait((waiting,))


async def test_stop_returns_prefetched_messages() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    lent.want(3)
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    for sequence in (1, 2):
        await transport.deliver(sequence, consumer=0, consumer_sequence=sequence)
    assert (await waiting).sequence == 1
    transport.leaving = lambda: transport.deliver(3, consumer=0, consumer_sequence=3)
    await lent.stop()
    assert sorted(given_back(transport)) == [2, 3]
    assert not transport.listening
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(2)
    await transport.deliver(4, consumer=0, consumer_sequence=4)
    assert (await waiting).sequence == 4


async def test_a_shared_consumer_that_is_gone_is_recreated() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    await transport.refuse("409", "Consumer Deleted")
    await transport.ordered(2)
    await transport.deliver(1, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 1


async def test_message_that_arrives_while_a_silent_request_is_withdrawn_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.consumers.PULL_SILENCE_SECONDS", 0.0)
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    transport.leaving = lambda: transport.deliver(1, consumer=0, consumer_sequence=1)
    assert (await lent.take()).sequence == 1
    assert len(transport.orders) == 1
    assert given_back(transport) == []


async def test_message_that_crosses_a_withdrawal_is_returned() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    transport.leaving = lambda: transport.deliver(7, consumer=0, consumer_sequence=1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given_back(transport) == [7]
    assert not transport.listening


async def test_message_that_arrives_with_a_cancellation_is_returned() -> None:
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    await transport.deliver(7, consumer=0, consumer_sequence=1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given_back(transport) == [7]


async def test_pull_request_from_before_a_reconnect_is_withdrawn() -> None:
    """After a reconnect the client listens on its inboxes again, so the old order would become valid again."""
    transport = ScriptedTransport()
    lent = lender(transport)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await transport.ordered(1)
    transport.generation += 1
    lent.want(1)  # woken, as after a reconnect
    await transport.ordered(2)
    assert list(transport.listening) == [transport.orders[1]]
    await transport.deliver(1, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 1
