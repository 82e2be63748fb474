"""The ports of the bus and its object store. Adapters: bus/jetstream/bus.py and bus/memory/bus.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from asyncrl.bus.rejections import Rejections
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import Service, Topic

DUPLICATE_SECONDS: Final = 600.0
"""How long a bus remembers a key. A message published again under the same key within this time is stored only once."""

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
Q = TypeVar("Q")
A = TypeVar("A")


class Delivery(Protocol[M_co]):
    """A work message in flight. If its consumer dies or is too slow to ack it, the bus redelivers it to another one."""

    @property
    def key(self) -> str: ...

    @property
    def attempt(self) -> int:
        """Delivery attempt, counted over all consumers, from 1."""
        ...

    @property
    def message(self) -> M_co | None:
        """None if the bytes could not be decoded; ``problem`` says why."""
        ...

    @property
    def problem(self) -> str: ...

    async def ack(self) -> None:
        """Acknowledge: on return, the message is not delivered again and no longer counts in ``depth`` (in a cluster:
        a moment later)."""
        ...

    async def retry(self, *, delay: float = 0.0) -> None:
        """Redeliver the message after ``delay`` seconds, to any consumer, with attempt + 1."""
        ...

    async def keep(self) -> None:
        """Restart the redelivery timer, because work on the message continues."""
        ...


class Deliveries(Protocol[M_co]):
    """Work messages as they arrive, an AsyncIterator. Cancelling ``anext`` acts as ``stop``."""

    def __aiter__(self) -> AsyncIterator[Delivery[M_co]]: ...

    async def __anext__(self) -> Delivery[M_co]: ...

    def want(self, count: int) -> None:
        """Set how many messages to prefetch ahead of ``anext``, which saves round trips on a long link; initially 1."""
        ...

    async def stop(self) -> None:
        """Pause delivery until the next ``anext``; prefetched messages return to the bus for other consumers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[M]):
    """One entry of a log.

    sequence  rises by one per entry, from 1
    message   None if the entry did not decode; ``problem`` says why
    stored    time of storage in nanoseconds of the bus's clock; 0 if unknown
    """

    sequence: int
    key: str
    message: M | None
    problem: str = ""
    num_bytes: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """The last log entry that was read. log: identity of the log, "" if unknown; sequence, stored: as in Record."""

    log: str = ""
    sequence: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """Current state of a log. first: sequence of its first entry; problem: why a mark is not of this log, or ""."""

    identity: str
    first: int
    problem: str = ""


class Request(Generic[Q, A]):
    """A request whose sender waits for the answer."""

    def __init__(self, question: Q, send: Callable[[bytes], Awaitable[None]]) -> None:
        self.question = question
        self._send = send

    async def answer(self, answer: A) -> None:
        await self._send(encode(answer))


class Bus(Protocol):
    """Carries typed messages between processes that share nothing else. Any method may raise BusError."""

    async def publish(self, topic: Topic[M], message: M, *, key: str, again: bool = False) -> bool:
        """Store a message on a work or log topic. Return False, and store nothing, if its key is stored there or, on a
        work topic, was stored recently. ``again``: the bus has lost the message, so ignore recently stored keys.

        Raises BusFull when the topic is full, and MessageTooLarge, which a retry cannot fix. If the topic allows it
        (``Topic.is_in_pieces``), a message larger than ``max_message_bytes`` is stored in pieces.
        """
        ...

    async def withdraw(self, topic: Topic[Any], *, key: str) -> None:
        """Remove a message of a work topic, even if a worker is processing it. A later ack succeeds, a later retry has
        no effect, and the key is free again. Does nothing if there is no such message. Only a learner may do this."""
        ...

    def consume(self, topic: Topic[M]) -> AbstractAsyncContextManager[Deliveries[M]]:
        """Consume a work topic, shared with all other consumers. On exit, messages without ack are redelivered."""
        ...

    def read(self, topic: Topic[M], *, after: int = 0) -> AbstractAsyncContextManager[AsyncIterator[Record[M]]]:
        """Yield log entries from sequence ``after`` + 1 on, then new entries as they are published, without end.

        In the learner the read raises BusLost as soon as the log is not the one that was read so far.
        """
        ...

    async def log_state(self, topic: Topic[Any], *, mark: LogMark) -> LogState:
        """Return the current state of the log and whether it is the log of ``mark``."""
        ...

    async def trim(self, topic: Topic[Any], *, through: int, is_over: Callable[[str], bool] | None = None) -> None:
        """Delete log entries up to and including sequence ``through``. Also delete pieces (``Topic.is_in_pieces``) of
        keys that are over, unless an entry of the key is left.

        is_over  called with the public part of a key: whether nothing will be published under it any more; None keeps
                 all pieces
        """
        ...

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        """Set a state. ``is_sure`` False: the message may be lost silently; for states that are soon set again."""
        ...

    def watch(self, topic: Topic[M], *, key: str = "") -> AbstractAsyncContextManager[AsyncIterator[M]]:
        """Yield the current state of one key, if any, then newer states; intermediate ones may be skipped."""
        ...

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        """Return the current state of every key, or of keys that begin with ``under``: "a/" or "a/b/" for "a/b/c". "*"
        in place of a part stands for any part."""
        ...

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        """Remove a state; a key that ends in "/" removes all keys with that prefix."""
        ...

    async def check(self) -> None:
        """Raise BusLost if a stream, bucket or consumer of the run was deleted, or went back to an earlier state, since
        we connected. Costs a request per stream; the learner calls it every few seconds."""
        ...

    async def depth(self, topic: Topic[Any]) -> int:
        """Return the number of stored messages: without ack on a work topic, not yet trimmed on a log."""
        ...

    async def keys(self, topic: Topic[Any]) -> set[str]:
        """Return the keys of the messages stored on a work or log topic."""
        ...

    async def last_sequence(self, topic: Topic[Any]) -> int:
        """Return the number of messages ever published on a work or log topic."""
        ...

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        """Return the answer of the process that serves the service; None if none answers within ``seconds``."""
        ...

    def serve(self, service: Service[Q, A]) -> AbstractAsyncContextManager[AsyncIterator[Request[Q, A]]]:
        """Yield requests as they arrive. If a request is left unanswered, ``ask`` returns None."""
        ...

    def lease(self, name: str, *, holder: str) -> AbstractAsyncContextManager[None]:
        """A lock over all processes of the run. Entering waits until the lease is free; waiters have no order.

        A holder that dies loses the lease within about five seconds. A holder that is cut off from the bus, or blocks
        its event loop, for that long also loses it, without notice. Use a lease to limit load, not to protect data. It
        is not reentrant. ``holder``: name shown to people who inspect the bus.
        """
        ...

    def objects(self) -> ObjectStore:
        """Return the run's object store, always the same one. It is closed with the bus."""
        ...

    @property
    def own_address(self) -> str:
        """This machine's address as others on the bus see it; loopback for a bus inside one process."""
        ...

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def rejections(self) -> Rejections:
        """Messages this process rejected. The bus notes states, requests and answers; actors note what they read."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """sha256: hexadecimal hash of the object's bytes."""

    name: str
    num_bytes: int
    sha256: str
    metadata: Mapping[str, str]


class ObjectStore(Protocol):
    """Named objects too large for a message. Blocking, thread-safe; each object has one writer. May raise BusError."""

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        """Store an object atomically, replacing one of the same name. ``blocks`` is consumed while it is sent."""
        ...

    def info(self, name: str) -> ObjectInfo | None:
        """Return an object's info; None if it does not exist."""
        ...

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        """Yield the object's bytes from ``start`` on, in order, across reconnects. Raises ObjectGone.

        The sha256 is not verified: the caller verifies it after reading everything.
        """
        ...

    def names(self) -> set[str]: ...

    def remove(self, name: str) -> None:
        """Remove an object; does nothing if it does not exist."""
        ...
