"""Storage of the memory bus: work in flight, logs, states with a time to live. Messages stay encoded here."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from asyncrl.bus.port import DUPLICATE_SECONDS, ObjectInfo
from asyncrl.errors import BusFull, ObjectGone

_CHUNK_BYTES = 2**17


class Changed:
    """Wakes all waiters. A waiter checks its condition first, without an await between the check and ``wait``."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def notify(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Keys:
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
class Item:
    """``holder`` counts deliveries and returns. A delivery is valid until it changes."""

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


class Work:
    def __init__(self, name: str, max_messages: int, ack_seconds: float) -> None:
        self.changed = Changed()
        self.last_sequence = 0
        self._name, self._max_messages, self._ack_seconds = name, max_messages, ack_seconds
        self._stored: dict[str, Item] = {}
        self._ready: deque[Item] = deque()
        self._known = Keys()

    def keys(self) -> list[str]:
        return list(self._stored)

    def add(self, key: str, data: bytes, *, again: bool = False) -> bool:
        if key in self._stored or (key in self._known and not again):
            return False
        if len(self._stored) >= self._max_messages:
            raise BusFull(f"{self._name}: holds {len(self._stored)} messages, the maximum")
        self._known.add(key)
        self._stored[key] = item = Item(key, data)
        self._ready.append(item)
        self.last_sequence += 1
        self.changed.notify()
        return True

    def take(self) -> Item | None:
        if not self._ready:
            return None
        item = self._ready.popleft()
        item.attempt += 1
        item.holder += 1
        self.keep(item)
        return item

    def keep(self, item: Item) -> None:
        """Restart the redelivery timer."""
        item.set_timer(self._ack_seconds, lambda: self._offer(item))

    def ack(self, item: Item) -> None:
        item.holder += 1
        item.stop_timer()
        if self._stored.get(item.key) is item:
            del self._stored[item.key]
        if item in self._ready:
            self._ready.remove(item)

    def remove(self, key: str) -> None:
        """Remove a message. A consumer that holds it may go on."""
        if (item := self._stored.pop(key, None)) is not None:
            item.stop_timer()
            if item in self._ready:
                self._ready.remove(item)

    def give_back(self, item: Item, delay: float) -> None:
        item.holder += 1
        if self._stored.get(item.key) is not item:
            return
        if delay:
            item.set_timer(delay, lambda: self._offer(item))
        else:
            self._offer(item)

    def _offer(self, item: Item) -> None:
        item.stop_timer()
        if item not in self._ready:
            self._ready.append(item)
            self.changed.notify()


@dataclass(frozen=True, slots=True)
class LogEntry:
    sequence: int
    key: str
    data: bytes
    time: float


class Log:
    def __init__(self, name: str, max_bytes: int, seconds_to_live: float) -> None:
        self.changed = Changed()
        self.last_sequence = 0
        self._name, self._max_bytes, self._seconds_to_live = name, max_bytes, seconds_to_live
        self._entries: deque[LogEntry] = deque()
        self._stored: set[str] = set()
        self._num_bytes = 0
        self.identity = uuid.uuid4().hex

    def keys(self) -> list[str]:
        self._expire()
        return list(self._stored)

    def add(self, key: str, data: bytes, *, again: bool = False) -> bool:
        self._expire()
        if key in self._stored:
            return False
        if self._max_bytes and self._num_bytes + len(data) > self._max_bytes:
            raise BusFull(f"{self._name}: holds {self._num_bytes:,} bytes of the {self._max_bytes:,} allowed")
        self.last_sequence += 1
        self._entries.append(LogEntry(self.last_sequence, key, data, time.monotonic()))
        self._stored.add(key)
        self._num_bytes += len(data)
        self.changed.notify()
        return True

    @property
    def first_sequence(self) -> int:
        return self._entries[0].sequence if self._entries else self.last_sequence + 1

    def first_after(self, sequence: int) -> LogEntry | None:
        self._expire()
        if not self._entries or sequence >= self.last_sequence:
            return None
        index = bisect.bisect_right(self._entries, sequence, key=lambda entry: entry.sequence)
        return self._entries[index] if index < len(self._entries) else None

    def find(self, key: str) -> bytes | None:
        return next((entry.data for entry in self._entries if entry.key == key), None)

    def remove(self, keys: Collection[str]) -> None:
        gone = self._stored & set(keys)
        self._num_bytes -= sum(len(entry.data) for entry in self._entries if entry.key in gone)
        self._entries = deque(entry for entry in self._entries if entry.key not in gone)
        self._stored -= gone

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
class Value:
    revision: int
    data: bytes
    time: float


@dataclass(slots=True)
class States:
    seconds_to_live: float
    values: dict[str, Value] = field(default_factory=dict)
    revision: int = 0
    changed: Changed = field(default_factory=Changed)

    def put(self, key: str, data: bytes) -> None:
        self.revision += 1
        self.values[key] = Value(self.revision, data, time.monotonic())
        self.changed.notify()

    def present(self) -> dict[str, Value]:
        if self.seconds_to_live:
            old = time.monotonic() - self.seconds_to_live
            self.values = {key: value for key, value in self.values.items() if value.time >= old}
        return self.values


class Objects:
    """See ``ObjectStore in bus/port.py``."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        data = b"".join(blocks)
        info = ObjectInfo(
            name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), metadata=dict(metadata)
        )
        self._objects[name] = (info, data)
        return info

    def info(self, name: str) -> ObjectInfo | None:
        found = self._objects.get(name)
        return None if found is None else found[0]

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        if name not in self._objects:
            raise ObjectGone(f"{name}: not in the object store")
        data = self._objects[name][1]
        for first in range(start, len(data), _CHUNK_BYTES):
            yield data[first : first + _CHUNK_BYTES]

    def names(self) -> set[str]:
        return set(self._objects)

    def remove(self, name: str) -> None:
        self._objects.pop(name, None)
