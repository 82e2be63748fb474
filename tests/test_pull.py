"""What a pull does with what a server may bring, in any order: no server, the test plays it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from asyncrl.bus.layout import reader
from asyncrl.bus.pull import Pull


class ScriptedWire:
    """A connection without a server: the test plays the server, also while a consumer is being made."""

    def __init__(self) -> None:
        self.generation = 0
        self.consumers: list[dict[str, Any]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._on_message: Callable[[Any], None] = lambda message: None

    async def online(self) -> None:
        pass

    async def api(self, verb: str, body: Any = None) -> dict[str, Any]:
        self.meanwhile()
        self.consumers.append(body["config"])
        return {}

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        pass

    async def subscribe(self, subject: str, on_message: Callable[[Any], None]) -> Any:
        self._on_message = on_message

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        pass

    def inbox(self) -> str:
        return "inbox"

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def deliver(self, sequence: int, *, consumer: int, consumer_sequence: int) -> None:
        name = self.consumers[consumer]["name"]
        reply = f"$JS.ACK.s.{name}.1.{sequence}.{consumer_sequence}.0.0"
        self._on_message(SimpleNamespace(subject="s.k", data=b"", headers=None, reply=reply))


def reading_pull(wire: ScriptedWire) -> Pull:
    names = itertools.count()
    return Pull(wire, stream="s", create=lambda last: reader(f"reader-{next(names)}", after=last), batch=10)


async def test_what_the_old_consumer_still_brings_while_the_new_one_is_made_is_not_read_twice() -> None:
    wire = ScriptedWire()
    pull = reading_pull(wire)
    await pull.start()
    wire.deliver(1, consumer=0, consumer_sequence=1)
    assert (await pull.take()).sequence == 1
    wire.generation += 1  # a reconnect that the consumer outlived
    wire.meanwhile = lambda: wire.deliver(2, consumer=0, consumer_sequence=2)
    waiting = asyncio.create_task(pull.take())
    while len(wire.consumers) < 2:
        await asyncio.sleep(0)
    assert wire.consumers[1]["opt_start_seq"] == 2
    wire.deliver(2, consumer=1, consumer_sequence=1)
    wire.deliver(3, consumer=1, consumer_sequence=2)
    assert [(await waiting).sequence, (await pull.take()).sequence] == [2, 3]


async def test_a_missing_message_is_read_again_from_a_new_consumer() -> None:
    wire = ScriptedWire()
    pull = reading_pull(wire)
    await pull.start()
    wire.deliver(1, consumer=0, consumer_sequence=1)
    wire.deliver(3, consumer=0, consumer_sequence=3)  # 2 was dropped on the way
    assert (await pull.take()).sequence == 1
    waiting = asyncio.create_task(pull.take())
    while len(wire.consumers) < 2:
        await asyncio.sleep(0)
    assert wire.consumers[1]["opt_start_seq"] == 2
    wire.deliver(2, consumer=1, consumer_sequence=1)
    assert (await waiting).sequence == 2
