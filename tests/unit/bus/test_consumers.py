"""A pull consumer handles everything a server may send, in any order. The test plays the server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.bus.jetstream.consumers import PullConsumer


async def nothing() -> None:
    pass


class ScriptedConnection:
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


def lender(connection: Any) -> PullConsumer:
    async def ready() -> None:
        await connection.api("CONSUMER.CREATE.s.workers", {"config": {"name": "workers"}})

    return PullConsumer(connection, stream="s", name="workers", ready=ready)


def given_back(connection: ScriptedConnection) -> list[int]:
    """Stream sequences of the messages that were given back."""
    return [int(subject.split(".")[5]) for subject, word in connection.sent if word == b"-NAK"]


async def test_expired_pull_request_is_repeated_and_the_consumer_stays() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    for number in range(1, 4):
        await connection.ordered(number)
        await connection.refuse("408", "Request Timeout")
    await connection.ordered(4)
    await connection.deliver(1, consumer=0, consumer_sequence=1)
    assert (await waiting).sequence == 1
    assert len(connection.consumers) == 1
    await lent.stop()
    assert not connection.listening
    assert given_back(connection) == []


async def test_no_more_is_requested_than_wanted() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    lent.want(3)
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    await connection.deliver(1, consumer=0, consumer_sequence=1)
    assert (await waiting).sequence == 1
    lent.want(2)  # two are on order
    waiting = asyncio.create_task(lent.take())
    await asyncio.sleep(0)
    lent.want(5)
    await connection.ordered(2)
    lent.want(6)  # one more is not worth an order
    for sequence in range(2, 7):
        await connection.deliver(sequence, consumer=0, consumer_sequence=sequence)
    assert (await waiting).sequence == 2
    assert [(await lent.take()).sequence for _ in range(4)] == [3, 4, 5, 6]
    assert connection.batches == [3, 3]


async def test_consumer_that_waits_long_has_one_pull_request() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    lent.want(4)
    await connection.ordered(2)
    await connection.refuse("408", "Request Timeout", pending=1)  # three are still on order
    await connection.refuse("408", "Request Timeout", pending=3)
    await connection.ordered(3)
    assert connection.batches == [1, 3, 4]
    waiting.cancel()
    await asyncio.wait((waiting,))


async def test_stop_returns_prefetched_messages() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    lent.want(3)
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    for sequence in (1, 2):
        await connection.deliver(sequence, consumer=0, consumer_sequence=sequence)
    assert (await waiting).sequence == 1
    connection.leaving = lambda: connection.deliver(3, consumer=0, consumer_sequence=3)
    await lent.stop()
    assert sorted(given_back(connection)) == [2, 3]
    assert not connection.listening
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(2)
    await connection.deliver(4, consumer=0, consumer_sequence=4)
    assert (await waiting).sequence == 4


async def test_a_shared_consumer_that_is_gone_is_recreated() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    await connection.refuse("409", "Consumer Deleted")
    await connection.ordered(2)
    await connection.deliver(1, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 1


async def test_message_that_arrives_while_a_silent_request_is_withdrawn_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.consumers.PULL_SILENCE_SECONDS", 0.0)
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    connection.leaving = lambda: connection.deliver(1, consumer=0, consumer_sequence=1)
    assert (await lent.take()).sequence == 1
    assert len(connection.orders) == 1
    assert given_back(connection) == []


async def test_message_that_crosses_a_withdrawal_is_returned() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    connection.leaving = lambda: connection.deliver(7, consumer=0, consumer_sequence=1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given_back(connection) == [7]
    assert not connection.listening


async def test_message_that_arrives_with_a_cancellation_is_returned() -> None:
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    await connection.deliver(7, consumer=0, consumer_sequence=1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given_back(connection) == [7]


async def test_pull_request_from_before_a_reconnect_is_withdrawn() -> None:
    """After a reconnect the client listens on its inboxes again, so the old order would become valid again."""
    connection = ScriptedConnection()
    lent = lender(connection)
    await lent.start()
    waiting = asyncio.create_task(lent.take())
    await connection.ordered(1)
    connection.generation += 1
    lent.want(1)  # woken, as after a reconnect
    await connection.ordered(2)
    assert list(connection.listening) == [connection.orders[1]]
    await connection.deliver(1, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 1
