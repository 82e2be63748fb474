"""A bus inside one process: the same guarantees without a server. For tests, and for runs that fit into one process.

Messages are encoded and decoded as on the wire, so that code that works here also works there. Any number of actors of
one event loop may share one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Generic, TypeVar

from asyncrl.bus.encoding import Each, Opened, encoded, opened
from asyncrl.bus.memory.stores import Item, Log, Objects, States, Work
from asyncrl.bus.pieces import Pieces, most_bytes
from asyncrl.bus.port import Deliveries, Delivery, LogMark, LogState, ObjectStore, Record, Request
from asyncrl.bus.rejections import Rejections
from asyncrl.bus.request_reply import Line, answer_of
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import PIECES, Service, Topic

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")


class MemoryBus:
    """See ``Bus in bus/port.py``. A delivery that is not acked or kept for ``ack_seconds`` goes to another consumer."""

    def __init__(
        self,
        *,
        max_prompts: int,
        max_log_bytes: int,
        ack_seconds: float,
        max_message_bytes: int,
        max_group_bytes: int = 2**30,
    ) -> None:
        self._max_prompts = max_prompts
        self._max_log_bytes = max_log_bytes
        self._ack_seconds = ack_seconds
        self._max_message_bytes = max_message_bytes
        self.rejections = Rejections()
        self._works: dict[str, Work] = {}
        self._logs: dict[str, Log] = {}
        self._states: dict[str, States] = {}
        self._lines: dict[tuple[str, str], Line[Any, Any]] = {}
        self._leases: dict[str, asyncio.Lock] = {}
        self._objects = Objects()
        self._pieces = Pieces(
            self,
            most=most_bytes(max_group_bytes=max_group_bytes, max_log_bytes=max_log_bytes),
            fetch=self._piece,
            remove=self._remove_pieces,
        )

    async def publish(self, topic: Topic[M], message: M, *, key: str, again: bool = False) -> bool:
        await _let_others_run()
        return self._queue(topic).add(key, await self._pieces.encoded(topic, message, key=key), again=again)

    async def withdraw(self, topic: Topic[Any], *, key: str) -> None:
        await _let_others_run()
        self._work(topic).remove(key)

    @contextlib.asynccontextmanager
    async def consume(self, topic: Topic[M]) -> AsyncIterator[Deliveries[M]]:
        deliveries = _Deliveries(self._work(topic), topic)
        try:
            yield deliveries
        finally:
            await deliveries.end()

    @contextlib.asynccontextmanager
    async def read(self, topic: Topic[M], *, after: int = 0) -> AsyncIterator[AsyncIterator[Record[M]]]:
        log = self._log(topic)
        position = after

        async def take() -> Record[M]:
            nonlocal position
            while (entry := log.first_after(position)) is None:
                await log.changed.wait()
            position = entry.sequence
            content, num_bytes = await self._pieces.opened(topic, key=entry.key, data=entry.data)
            return Record(
                sequence=entry.sequence,
                key=entry.key,
                message=content.message,
                problem=content.problem,
                num_bytes=num_bytes,
            )

        yield Each(take)

    async def log_state(self, topic: Topic[Any], *, mark: LogMark) -> LogState:
        await _let_others_run()
        log = self._log(topic)
        is_other = log.last_sequence < mark.sequence if not mark.log else mark.log != log.identity
        return LogState(identity=log.identity, first=log.first_sequence, problem="it is a new log" if is_other else "")

    async def trim(self, topic: Topic[Any], *, through: int, is_over: Callable[[str], bool] | None = None) -> None:
        await _let_others_run()
        self._log(topic).trim(through)
        await self._pieces.tidy(topic, is_over=is_over)

    async def _piece(self, key: str) -> bytes | None:
        return self._log(PIECES).find(key)

    async def _remove_pieces(self, keys: Collection[str]) -> None:
        self._log(PIECES).remove(keys)

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        await _let_others_run()
        self._state(topic).put(key, self._encoded(topic, message, key))

    @contextlib.asynccontextmanager
    async def watch(self, topic: Topic[M], *, key: str = "") -> AsyncIterator[AsyncIterator[M]]:
        states = self._state(topic)
        revision = 0

        async def take() -> M:
            nonlocal revision
            while True:
                while (value := states.present().get(key)) is None or value.revision <= revision:
                    await states.changed.wait()
                revision = value.revision
                content = opened(value.data, topic, key=key)
                if content.message is not None:
                    return content.message
                self.rejections.note(topic.name, f"state {key!r}: {content.problem}")

        yield Each(take)

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        await _let_others_run()
        found: dict[str, M] = {}
        for key, value in self._state(topic).present().items():
            if not _is_under(key, under):
                continue
            content = opened(value.data, topic, key=key)
            if content.message is not None:
                found[key] = content.message
            else:
                self.rejections.note(topic.name, f"state {key!r}: {content.problem}")
        return found

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        await _let_others_run()
        values = self._state(topic).values
        for gone in [one for one in values if one == key or (key.endswith("/") and one.startswith(key))]:
            del values[gone]

    async def check(self) -> None:
        """Do nothing: no other process reaches this bus."""

    async def depth(self, topic: Topic[Any]) -> int:
        await _let_others_run()
        return len(self._queue(topic).keys())

    async def keys(self, topic: Topic[Any]) -> set[str]:
        await _let_others_run()
        return set(self._queue(topic).keys())

    async def last_sequence(self, topic: Topic[Any]) -> int:
        await _let_others_run()
        return self._queue(topic).last_sequence

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        await _let_others_run()
        line = self._lines.get((service.name, service.key))
        if line is None:
            return None
        answered = asyncio.get_running_loop().create_future()

        async def send(data: bytes) -> None:
            if not answered.done():
                answered.set_result(data)

        line.add(encode(question), send)
        try:
            async with asyncio.timeout(seconds):
                answer = await answered
                return answer_of(answer, service, self.rejections)
        except TimeoutError:
            return None

    @contextlib.asynccontextmanager
    async def serve(self, service: Service[Q, A]) -> AsyncIterator[AsyncIterator[Request[Q, A]]]:
        line = self._lines[service.name, service.key] = Line(service, self.rejections)
        try:
            yield Each(line.take)
        finally:
            del self._lines[service.name, service.key]

    @contextlib.asynccontextmanager
    async def lease(self, name: str, *, holder: str) -> AsyncIterator[None]:
        """A holder dies with this process, so no timeout is needed."""
        async with self._leases.setdefault(name, asyncio.Lock()):
            yield

    def objects(self) -> ObjectStore:
        return self._objects

    @property
    def own_address(self) -> str:
        return "127.0.0.1"

    @property
    def max_message_bytes(self) -> int:
        return self._max_message_bytes

    async def close(self) -> None:
        """Do nothing: other actors may still use the bus."""

    def _encoded(self, topic: Topic[M], message: M, key: str) -> bytes:
        return encoded(message, topic=topic, key=key, limit=self._max_message_bytes)

    def _queue(self, topic: Topic[Any]) -> Work | Log:
        return self._work(topic) if topic.kind == "work" else self._log(topic)

    def _work(self, topic: Topic[Any]) -> Work:
        assert topic.kind == "work", topic
        return self._works.setdefault(
            topic.name, Work(topic.name, topic.most_messages or self._max_prompts, self._ack_seconds)
        )

    def _log(self, topic: Topic[Any]) -> Log:
        assert topic.kind == "log", topic
        max_bytes = self._max_log_bytes if not topic.seconds_to_live else 0
        return self._logs.setdefault(topic.name, Log(topic.name, max_bytes, topic.seconds_to_live))

    def _state(self, topic: Topic[Any]) -> States:
        assert topic.kind == "state", topic
        return self._states.setdefault(topic.name, States(topic.seconds_to_live))


def _is_under(key: str, under: str) -> bool:
    """Whether a key begins with the parts of ``under``, as in Bus.states."""
    parts = under.split("/")[:-1]
    own = key.split("/")
    return len(own) > len(parts) and all(part in ("*", mine) for part, mine in zip(parts, own, strict=False))


async def _let_others_run() -> None:
    """Yield to the event loop, as waiting for a server does: a caller in a loop must not block the other actors."""
    await asyncio.sleep(0)


class _Deliveries(AsyncIterator[Delivery[M]], Generic[M]):
    """Work messages. Nothing is prefetched: each is delivered when it is asked for."""

    def __init__(self, work: Work, topic: Topic[M]) -> None:
        self._work, self._topic = work, topic
        self._held: list[_Delivery[M]] = []

    async def __anext__(self) -> Delivery[M]:
        while (item := self._work.take()) is None:
            await self._work.changed.wait()
        self._held = [one for one in self._held if one.is_ours()] + [self._deliver(item)]
        return self._held[-1]

    def _deliver(self, item: Item) -> _Delivery[M]:
        return _Delivery(self._work, item, opened(item.data, self._topic, key=item.key))

    def want(self, count: int) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def end(self) -> None:
        for delivery in self._held:
            await delivery.retry()


class _Delivery(Generic[M]):
    def __init__(self, work: Work, item: Item, content: Opened[M]) -> None:
        self._work, self._item, self._holder = work, item, item.holder
        self.key, self.attempt = item.key, item.attempt
        self.message, self.problem = content.message, content.problem

    def is_ours(self) -> bool:
        return self._item.holder == self._holder

    async def ack(self) -> None:
        """Acknowledge, even if another consumer holds the message now: the work is done."""
        self._work.ack(self._item)

    async def retry(self, *, delay: float = 0.0) -> None:
        if self.is_ours():
            self._work.give_back(self._item, delay)

    async def keep(self) -> None:
        if self.is_ours() and self._item.timer is not None:
            self._work.keep(self._item)
