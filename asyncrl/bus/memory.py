"""The bus inside one process: the promises of the port, no server. For tests, and for runs that fit one process.

Messages are encoded and decoded as on the wire, so that what passes here passes there. One instance may serve any
number of actors of one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl.bus.handover import Each, encoded, opened
from asyncrl.bus.layout import DUPLICATE_SECONDS
from asyncrl.errors import BusFull
from asyncrl.protocols import Delivery, Record
from asyncrl.topics import Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")


class MemoryBus:
    """See ``protocols.Bus``. ``ack_seconds``: a delivery nobody acks or keeps for so long goes to another consumer."""

    def __init__(self, *, max_prompts: int, max_log_bytes: int, ack_seconds: float, max_message_bytes: int) -> None:
        self._max_prompts = max_prompts
        self._max_log_bytes = max_log_bytes
        self._ack_seconds = ack_seconds
        self._max_message_bytes = max_message_bytes
        self._works: dict[str, _Work] = {}
        self._logs: dict[str, _Log] = {}
        self._states: dict[str, _States] = {}

    async def publish(self, topic: Topic[M], message: M, *, key: str) -> bool:
        await _let_others_run()
        data = encoded(message, topic=topic, key=key, limit=self._max_message_bytes)
        return self._queue(topic).add(key, data)

    @contextlib.asynccontextmanager
    async def consume(self, topic: Topic[M]) -> AsyncIterator[AsyncIterator[Delivery[M]]]:
        work = self._work(topic)
        held: list[_Delivery[M]] = []

        async def take() -> Delivery[M]:
            while (item := work.take()) is None:
                await work.changed.wait()
            held[:] = [delivery for delivery in held if delivery.is_ours()]
            held.append(_Delivery(work, item, topic))
            return held[-1]

        try:
            yield Each(take)
        finally:
            for delivery in held:
                await delivery.retry()

    @contextlib.asynccontextmanager
    async def read(self, topic: Topic[M], *, after: int = 0) -> AsyncIterator[AsyncIterator[Record[M]]]:
        log = self._log(topic)
        position = after

        async def take() -> Record[M]:
            nonlocal position
            while (entry := log.first_after(position)) is None:
                await log.changed.wait()
            position = entry.sequence
            content = opened(entry.data, topic)
            return Record(
                sequence=entry.sequence,
                key=entry.key,
                message=content.message,
                problem=content.problem,
                num_bytes=len(entry.data),
            )

        yield Each(take)

    async def trim(self, topic: Topic[Any], *, through: int) -> None:
        await _let_others_run()
        self._log(topic).trim(through)

    async def put(self, topic: Topic[M], message: M, *, key: str = "") -> None:
        await _let_others_run()
        data = encoded(message, topic=topic, key=key, limit=self._max_message_bytes)
        self._state(topic).put(key, data)

    @contextlib.asynccontextmanager
    async def watch(self, topic: Topic[M], *, key: str = "") -> AsyncIterator[AsyncIterator[M]]:
        states = self._state(topic)
        seen = 0

        async def take() -> M:
            nonlocal seen
            while True:
                while (value := states.present().get(key)) is None or value.revision <= seen:
                    await states.changed.wait()
                seen = value.revision
                content = opened(value.data, topic)
                if content.message is not None:
                    return content.message
                logger.warning("%s %s: skipped a state: %s", topic.name, key, content.problem)

        yield Each(take)

    async def states(self, topic: Topic[M]) -> dict[str, M]:
        await _let_others_run()
        found: dict[str, M] = {}
        for key, value in self._state(topic).present().items():
            content = opened(value.data, topic)
            if content.message is not None:
                found[key] = content.message
            else:
                logger.warning("%s %s: skipped a state: %s", topic.name, key, content.problem)
        return found

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        await _let_others_run()
        self._state(topic).values.pop(key, None)

    async def depth(self, topic: Topic[Any]) -> int:
        await _let_others_run()
        return len(self._queue(topic).keys())

    async def keys(self, topic: Topic[Any]) -> set[str]:
        await _let_others_run()
        return set(self._queue(topic).keys())

    async def last_sequence(self, topic: Topic[Any]) -> int:
        await _let_others_run()
        return self._queue(topic).last_sequence

    @property
    def max_message_bytes(self) -> int:
        return self._max_message_bytes

    async def close(self) -> None:
        """Nothing: other actors may still use it."""

    def _queue(self, topic: Topic[Any]) -> _Work | _Log:
        return self._work(topic) if topic.kind == "work" else self._log(topic)

    def _work(self, topic: Topic[Any]) -> _Work:
        assert topic.kind == "work", topic
        return self._works.setdefault(topic.name, _Work(topic.name, self._max_prompts, self._ack_seconds))

    def _log(self, topic: Topic[Any]) -> _Log:
        assert topic.kind == "log", topic
        max_bytes = self._max_log_bytes if not topic.seconds_to_live else 0
        return self._logs.setdefault(topic.name, _Log(topic.name, max_bytes, topic.seconds_to_live))

    def _state(self, topic: Topic[Any]) -> _States:
        assert topic.kind == "state", topic
        return self._states.setdefault(topic.name, _States(topic.seconds_to_live))


async def _let_others_run() -> None:
    """As a server's answer does: who calls in a loop, a full topic say, must not be alone in the process."""
    await asyncio.sleep(0)


class _Changed:
    """Wakes everybody who waits. Who waits looks first, without an await between look and wait."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def tell(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class _Keys:
    """Keys published in the last ten minutes, oldest first."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def add(self, key: str) -> None:
        self._times[key] = time.monotonic()

    def __contains__(self, key: str) -> bool:
        old = time.monotonic() - DUPLICATE_SECONDS
        while self._times and self._times[first := next(iter(self._times))] < old:
            del self._times[first]
        return key in self._times


@dataclass(slots=True, eq=False)
class _Item:
    """``holder`` counts deliveries and returns: a delivery is in force as long as it has not changed."""

    key: str
    data: bytes
    attempt: int = 0
    holder: int = 0
    timer: asyncio.TimerHandle | None = None

    def set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(seconds, then)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Work:
    def __init__(self, name: str, max_messages: int, ack_seconds: float) -> None:
        self.changed = _Changed()
        self.last_sequence = 0
        self._name, self._max_messages, self._ack_seconds = name, max_messages, ack_seconds
        self._stored: dict[str, _Item] = {}
        self._ready: deque[_Item] = deque()
        self._known = _Keys()

    def keys(self) -> list[str]:
        return list(self._stored)

    def add(self, key: str, data: bytes) -> bool:
        if key in self._stored or key in self._known:
            return False
        if len(self._stored) >= self._max_messages:
            raise BusFull(f"{self._name}: holds {len(self._stored)} messages, as many as it may")
        self._known.add(key)
        self._stored[key] = item = _Item(key, data)
        self._ready.append(item)
        self.last_sequence += 1
        self.changed.tell()
        return True

    def take(self) -> _Item | None:
        if not self._ready:
            return None
        item = self._ready.popleft()
        item.attempt += 1
        item.holder += 1
        self.keep(item)
        return item

    def keep(self, item: _Item) -> None:
        """Start the redelivery clock anew."""
        item.set_timer(self._ack_seconds, lambda: self._offer(item))

    def ack(self, item: _Item) -> None:
        item.holder += 1
        item.stop_timer()
        if self._stored.get(item.key) is item:
            del self._stored[item.key]
        if item in self._ready:
            self._ready.remove(item)

    def give_back(self, item: _Item, delay: float) -> None:
        item.holder += 1
        if delay:
            item.set_timer(delay, lambda: self._offer(item))
        else:
            self._offer(item)

    def _offer(self, item: _Item) -> None:
        item.stop_timer()
        if item not in self._ready:
            self._ready.append(item)
            self.changed.tell()


class _Delivery(Generic[M]):
    def __init__(self, work: _Work, item: _Item, topic: Topic[M]) -> None:
        self._work, self._item, self._holder = work, item, item.holder
        self.attempt = item.attempt
        self._content = opened(item.data, topic)

    @property
    def key(self) -> str:
        return self._item.key

    @property
    def message(self) -> M | None:
        return self._content.message

    @property
    def problem(self) -> str:
        return self._content.problem

    def is_ours(self) -> bool:
        return self._item.holder == self._holder

    async def ack(self) -> None:
        """Also when somebody else holds it by now: it was done."""
        self._work.ack(self._item)

    async def retry(self, *, delay: float = 0.0) -> None:
        if self.is_ours():
            self._work.give_back(self._item, delay)

    async def keep(self) -> None:
        if self.is_ours() and self._item.timer is not None:
            self._work.keep(self._item)


@dataclass(frozen=True, slots=True)
class _Entry:
    sequence: int
    key: str
    data: bytes
    time: float


class _Log:
    def __init__(self, name: str, max_bytes: int, seconds_to_live: float) -> None:
        self.changed = _Changed()
        self.last_sequence = 0
        self._name, self._max_bytes, self._seconds_to_live = name, max_bytes, seconds_to_live
        self._entries: deque[_Entry] = deque()
        self._stored: set[str] = set()
        self._num_bytes = 0
        self._known = _Keys()

    def keys(self) -> list[str]:
        self._expire()
        return list(self._stored)

    def add(self, key: str, data: bytes) -> bool:
        self._expire()
        if key in self._stored or key in self._known:
            return False
        if self._max_bytes and self._num_bytes + len(data) > self._max_bytes:
            raise BusFull(f"{self._name}: holds {self._num_bytes:,} bytes of the {self._max_bytes:,} it may")
        self.last_sequence += 1
        self._entries.append(_Entry(self.last_sequence, key, data, time.monotonic()))
        self._known.add(key)
        self._stored.add(key)
        self._num_bytes += len(data)
        self.changed.tell()
        return True

    def first_after(self, sequence: int) -> _Entry | None:
        self._expire()
        if not self._entries or sequence >= self.last_sequence:
            return None
        first = self._entries[0].sequence
        return self._entries[max(0, sequence + 1 - first)]

    def trim(self, through: int) -> None:
        while self._entries and self._entries[0].sequence <= through:
            gone = self._entries.popleft()
            self._stored.discard(gone.key)
            self._num_bytes -= len(gone.data)

    def _expire(self) -> None:
        if self._seconds_to_live:
            old = time.monotonic() - self._seconds_to_live
            while self._entries and self._entries[0].time < old:
                self.trim(self._entries[0].sequence)


@dataclass(frozen=True, slots=True)
class _Value:
    revision: int
    data: bytes
    time: float


@dataclass(slots=True)
class _States:
    seconds_to_live: float
    values: dict[str, _Value] = field(default_factory=dict)
    revision: int = 0
    changed: _Changed = field(default_factory=_Changed)

    def put(self, key: str, data: bytes) -> None:
        self.revision += 1
        self.values[key] = _Value(self.revision, data, time.monotonic())
        self.changed.tell()

    def present(self) -> dict[str, _Value]:
        if self.seconds_to_live:
            old = time.monotonic() - self.seconds_to_live
            self.values = {key: value for key, value in self.values.items() if value.time >= old}
        return self.values
