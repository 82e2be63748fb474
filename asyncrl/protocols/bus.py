"""The bus, and its store of large objects. Adapters: bus/jetstream.py, bus/memory.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.refusals import Refusals
from asyncrl.topics import Service, Topic

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
Q = TypeVar("Q")
A = TypeVar("A")
Q_co = TypeVar("Q_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class Delivery(Protocol[M_co]):
    """A work message on loan. Until it is acked the bus gives it to somebody else when we are gone or too slow."""

    @property
    def key(self) -> str: ...

    @property
    def attempt(self) -> int:
        """1 the first time this message is delivered to anybody."""
        ...

    @property
    def message(self) -> M_co | None:
        """None when the bytes were not a message; ``problem`` says why."""
        ...

    @property
    def problem(self) -> str: ...

    async def ack(self) -> None:
        """Done: when this returns, nobody gets the message again, and the bus no longer counts it (a cluster: a moment
        later)."""
        ...

    async def retry(self, *, delay: float = 0.0) -> None:
        """Give it to somebody (perhaps us) again after ``delay`` seconds, with attempt + 1."""
        ...

    async def keep(self) -> None:
        """Still working on it: start the redelivery clock anew."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[M]):
    """One entry of a log. ``sequence`` rises by one per entry from 1; ``message`` is None when it did not decode."""

    sequence: int
    key: str
    message: M | None
    problem: str = ""
    num_bytes: int = 0


class Asked(Protocol[Q_co, A_contra]):
    """A question somebody waits with."""

    @property
    def question(self) -> Q_co: ...

    async def answer(self, answer: A_contra) -> None: ...


class Bus(Protocol):
    """Carries typed messages between processes that share nothing else. Every method may raise BusError."""

    async def publish(self, topic: Topic[M], message: M, *, key: str) -> bool:
        """Store a message on a work or log topic. False: one with this key is or was there lately; nothing was stored.

        Raises BusFull when the topic is full, MessageTooLarge when no retry can help.
        """
        ...

    def consume(self, topic: Topic[M]) -> AbstractAsyncContextManager[AsyncIterator[Delivery[M]]]:
        """Work, one message at a time, shared with every other consumer. Leaving gives back what was not acked."""
        ...

    def read(self, topic: Topic[M], *, after: int = 0) -> AbstractAsyncContextManager[AsyncIterator[Record[M]]]:
        """The log from sequence ``after`` + 1 on, then what is published next, for ever."""
        ...

    async def trim(self, topic: Topic[Any], *, through: int) -> None:
        """Forget log entries up to sequence ``through``."""
        ...

    async def put(self, topic: Topic[M], message: M, *, key: str = "") -> None:
        """Set a state."""
        ...

    def watch(self, topic: Topic[M], *, key: str = "") -> AbstractAsyncContextManager[AsyncIterator[M]]:
        """The state of one key if there is one, then each newer one; states in between may be skipped."""
        ...

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        """The present state of every key, or of those that begin with ``under``: "a/" or "a/b/" of "a/b/c"."""
        ...

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        """Remove a state; with a key that ends in "/", all that begin with it."""
        ...

    async def depth(self, topic: Topic[Any]) -> int:
        """Messages stored: on a work topic those not yet acked, on a log those not yet trimmed."""
        ...

    async def keys(self, topic: Topic[Any]) -> set[str]:
        """Keys of the messages stored on a work or log topic."""
        ...

    async def last_sequence(self, topic: Topic[Any]) -> int:
        """How many messages were ever published on a work or log topic."""
        ...

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        """What whoever serves it answers; None when nobody serves it, or not within ``seconds``."""
        ...

    def serve(self, service: Service[Q, A]) -> AbstractAsyncContextManager[AsyncIterator[Asked[Q, A]]]:
        """Questions as they come; one left unanswered is None to whoever asked."""
        ...

    def lease(self, name: str, *, holder: str) -> AbstractAsyncContextManager[None]:
        """Held by one at a time, among all processes of the run; entering waits until it is free, in no order.

        A holder that dies loses it within five seconds or so. One that is cut off from the bus, or blocks its event
        loop, for that long loses it too and is not told: a lease limits load, it does not protect data. It is not
        reentrant. ``holder``: for people who look at the bus.
        """
        ...

    def objects(self) -> ObjectStore:
        """The run's large objects; the same store each time. It ends with the bus."""
        ...

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def refusals(self) -> Refusals:
        """What this process would not take. The bus notes states, questions and answers; actors what they read."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """sha256: of its bytes, hexadecimal."""

    name: str
    num_bytes: int
    sha256: str
    metadata: Mapping[str, str]


class ObjectStore(Protocol):
    """Bytes too many for a message, under a name. Blocking and thread-safe; one writer. May raise BusError."""

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        """Store an object, whole or not at all; one of that name is replaced. Takes ``blocks`` as it sends them."""
        ...

    def info(self, name: str) -> ObjectInfo | None:
        """None when there is none of that name."""
        ...

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        """Its bytes from ``start`` on, in order, whatever happens to the connection. Raises ObjectGone.

        Nothing is checked against its sha256: who has all of it does that.
        """
        ...

    def names(self) -> set[str]: ...

    def remove(self, name: str) -> None:
        """Nothing happens when it is not there."""
        ...
