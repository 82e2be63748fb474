"""The ports of the bus and its object store. Adapters: bus/jetstream/bus.py, bus/memory/bus.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from asyncrl.messages.topics import Service, Topic
from asyncrl.protocols.rejections import Rejections

DUPLICATE_SECONDS: Final = 600.0
"""How long a bus remembers a key: what is published under it again in this time is there once."""

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
Q = TypeVar("Q")
A = TypeVar("A")
Q_co = TypeVar("Q_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class Delivery(Protocol[M_co]):
    """A work message in flight. If we die or are too slow to ack it, the bus redelivers it to another consumer."""

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
        """Redeliver it after ``delay`` seconds, to any consumer, with attempt + 1."""
        ...

    async def keep(self) -> None:
        """Still working on it: restart the redelivery timer."""
        ...


class Deliveries(Protocol[M_co]):
    """Work messages as they arrive, an AsyncIterator. Cancelling ``anext`` acts as ``stop``."""

    def __aiter__(self) -> AsyncIterator[Delivery[M_co]]: ...

    async def __anext__(self) -> Delivery[M_co]: ...

    def want(self, count: int) -> None:
        """How many messages to prefetch ahead of ``anext``, which saves round trips over a long link; initially 1."""
        ...

    def on_unread(self, tell: Callable[[Delivery[M_co]], Awaitable[None]]) -> None:
        """Told of each message that has arrived, was not asked for with ``anext``, and goes back to the bus."""
        ...

    async def stop(self) -> None:
        """Pause delivery until the next ``anext``; prefetched messages go back to the bus for others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[M]):
    """One entry of a log. ``sequence`` rises by one per entry from 1; ``message`` is None when it did not decode;
    ``stored``: when it was stored, in nanoseconds of the bus's clock; 0: unknown."""

    sequence: int
    key: str
    message: M | None
    problem: str = ""
    num_bytes: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """The last entry that was read of a log. log: the log's identity; "": unknown; sequence, stored: as in Record."""

    log: str = ""
    sequence: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """A log as it is now. first: sequence of its first entry; problem: why a mark is not of it, or ""."""

    identity: str
    first: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Something on the bus that is not as it was: gone, made anew, back at an earlier state, emptied, or altered.

    name       of it on the bus;  topics: names of those that it holds; empty for the object store
    problem    what became of it; follows its name
    is_gone    it is not there now
    is_repaired  it is restored, though not what it held
    """

    name: str
    topics: tuple[str, ...] = ()
    problem: str
    is_gone: bool = False
    is_repaired: bool = False


Veto = Callable[[int, str], str]
"""Of a log entry's sequence and key: why it must not be decoded, the record's problem then; "" to decode it."""


class Asked(Protocol[Q_co, A_contra]):
    """A request whose sender waits for the answer."""

    @property
    def question(self) -> Q_co: ...

    async def answer(self, answer: A_contra) -> None: ...


class Bus(Protocol):
    """Carries typed messages between processes that share nothing else. Every method may raise BusError."""

    async def publish(self, topic: Topic[M], message: M, *, key: str, again: bool = False) -> bool:
        """Store a message on a work or log topic. False if its key is stored there, or was recently on a work topic:
        nothing is stored. ``again``: the bus has lost it; that it was there recently does not count.

        Raises BusFull when the topic is full, MessageTooLarge, which retrying cannot help. Where the topic says so
        (``Topic.is_in_pieces``), a message larger than ``max_message_bytes`` is stored in pieces.
        """
        ...

    async def withdraw(self, topic: Topic[Any], *, key: str) -> None:
        """Remove the message of a work topic, though somebody may be working on it: an ack of it succeeds, a retry
        brings nothing back, and its key is free again. Nothing happens when there is none. Only a learner may."""
        ...

    def consume(self, topic: Topic[M]) -> AbstractAsyncContextManager[Deliveries[M]]:
        """Consume a work topic, shared with all other consumers. On exit, unacked messages are redelivered."""
        ...

    def read(
        self, topic: Topic[M], *, after: int = 0, veto: Veto | None = None, mark: LogMark | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record[M]]]:
        """The log from sequence ``after`` + 1 on, then new entries as they are published, without end.

        ``veto`` is asked just before each entry is decoded. With ``mark``, which only a learner may give, raises
        LogChanged as soon as the log is not the one that the mark and the entries read since are of: made anew, or back
        at an earlier state.
        """
        ...

    async def log_state(self, topic: Topic[Any], *, mark: LogMark) -> LogState:
        """The log as it is now, and whether it is the one of ``mark``."""
        ...

    async def trim(
        self, topic: Topic[Any], *, through: int, log: str = "", is_over: Callable[[str], bool] | None = None
    ) -> None:
        """Delete log entries up to and including sequence ``through``, and pieces (``Topic.is_in_pieces``) of keys that
        are over, unless an entry is left under them.

        log      identity (LogState) of the log whose sequence that is: another one is left alone; empty is any
        is_over  of the public part of a key: whether nothing is published under it any more; None leaves all pieces
        """
        ...

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        """Set a state. ``is_sure`` False: it may be lost silently; for states that are soon set again anyway."""
        ...

    def watch(self, topic: Topic[M], *, key: str = "") -> AbstractAsyncContextManager[AsyncIterator[M]]:
        """The current state of one key, if any, then newer ones; intermediate states may be skipped."""
        ...

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        """The current state of every key, or of keys that begin with ``under``: "a/" or "a/b/" for "a/b/c"."""
        ...

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        """Remove a state; a key that ends in "/" removes all keys that begin with it."""
        ...

    async def restore(self, *, anew: bool = False) -> list[str]:
        """Put again our states on the learner's topics that somebody replaced or removed; says which. ``anew``: also
        those that stand, for watchers who may not have heard of them."""
        ...

    async def losses(self, *, repairs: bool = False) -> list[Loss]:
        """What of the run is gone from the bus, or has changed since this was last asked, though nobody of the run did
        it. ``repairs``: make it again, as only a learner may; what it held is for others to publish again.
        """
        ...

    async def depth(self, topic: Topic[Any]) -> int:
        """Number of messages stored: not yet acked on a work topic, not yet trimmed on a log."""
        ...

    async def undelivered(self, topic: Topic[Any]) -> int:
        """Number of messages stored on a work topic that nobody was ever given."""
        ...

    async def keys(self, topic: Topic[Any]) -> set[str]:
        """Keys of the messages stored on a work or log topic."""
        ...

    async def last_sequence(self, topic: Topic[Any]) -> int:
        """Number of messages ever published on a work or log topic."""
        ...

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        """The answer of whoever serves it; None if nobody does, or not within ``seconds``."""
        ...

    def serve(self, service: Service[Q, A]) -> AbstractAsyncContextManager[AsyncIterator[Asked[Q, A]]]:
        """Requests as they arrive; for one left unanswered, ``ask`` returns None."""
        ...

    def lease(self, name: str, *, holder: str, is_namesakes: bool = False) -> AbstractAsyncContextManager[None]:
        """A lock over all processes of the run. Entering waits until it is free; waiters are served in no order.

        A holder that dies loses it within about five seconds. One that is cut off from the bus, or blocks its event
        loop, for that long also loses it, without notice: use it to limit load, not to protect data. Not reentrant.
        ``holder``: a name for people who inspect the bus; where it is a name that has a key, nobody else may give it.
        ``is_namesakes``: who has another key than we cannot hold it, whatever it stores.
        """
        ...

    def objects(self) -> ObjectStore:
        """The run's object store; the same one each time. It is closed with the bus."""
        ...

    @property
    def own_address(self) -> str:
        """This machine's address as seen by others on the bus; loopback for a bus inside one process."""
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
    """sha256: of the object's bytes, in hexadecimal."""

    name: str
    num_bytes: int
    sha256: str
    metadata: Mapping[str, str]


class ObjectStore(Protocol):
    """Named objects too large for a message. Blocking and thread-safe; one writer of each. May raise BusError."""

    @property
    def elsewhere(self) -> tuple[str, bytes]:
        """For another rank of the learner: MODULE:FUNCTION, and the bytes of which that opens the same store there.

        Two empty ones where only this process has it.
        """
        ...

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        """Store an object atomically, replacing one of the same name. Consumes ``blocks`` as it sends them."""
        ...

    def info(self, name: str) -> ObjectInfo | None:
        """None if there is no such object."""
        ...

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        """The object's bytes from ``start`` on, in order, across reconnects. Raises ObjectGone.

        The sha256 is not verified: the caller does that once it has everything.
        """
        ...

    def names(self) -> set[str]: ...

    def whole(self) -> set[str]:
        """Names of the objects of which nothing is missing; bytes are counted, not read."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object; does nothing if it does not exist."""
        ...
