"""An actor: one name, one loop, four moments in its life, and one sentence about what it waits for."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from asyncrl.messages import Heartbeat
from asyncrl.protocols import Bus
from asyncrl.topics import ACTORS

T = TypeVar("T")


class Actor(abc.ABC):
    """start() -> run() -> stop(), with drain() at any time in between.

    start  acquires (connect, load a model). Raising here fails the process.
    run    works until its input ends, it is drained, or it is cancelled. Raising means this process is broken.
    drain  asks run to take no new work, finish what it holds and return.
    stop   releases. Always called, also after a failed start.
    """

    role = "actor"

    def __init__(self, name: str, bus: Bus) -> None:
        self.name = name
        self.bus = bus
        self.draining = asyncio.Event()
        self.log = logging.getLogger(f"asyncrl.{name}")
        self._waits: dict[object, tuple[float, str]] = {}

    async def start(self) -> None:  # noqa: B027 - nothing to acquire is a fine default
        pass

    @abc.abstractmethod
    async def run(self) -> None: ...

    def drain(self) -> None:
        self.draining.set()

    async def stop(self) -> None:  # noqa: B027
        pass

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says on the bus, while inside, that this actor waits for ``what`` and since when."""
        wait = object()
        self._waits[wait] = (time.time(), what)
        try:
            yield
        finally:
            del self._waits[wait]

    def heartbeat(self) -> Heartbeat:
        """What this actor does now; its oldest wait if it has several."""
        since, waits_for = min(self._waits.values(), default=(0.0, ""))
        run_epoch, policy_version = self.version
        return Heartbeat(
            actor=self.name,
            role=self.role,
            run_epoch=run_epoch,
            policy_version=policy_version,
            waits_for=waits_for,
            waiting_since=since,
            host=socket.gethostname(),
            pid=os.getpid(),
            numbers=self.numbers(),
        )

    @property
    def version(self) -> tuple[int, int]:
        """(run_epoch, policy_version) this actor works with."""
        return (0, 0)

    def numbers(self) -> dict[str, float]:
        """Gauges and counters for the heartbeat."""
        return {}

    async def until_drained(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """``items`` until drain() is called. An item that arrives together with the drain is given back by the bus."""
        draining = asyncio.ensure_future(self.draining.wait())
        try:
            while not self.draining.is_set():
                item = asyncio.ensure_future(anext(items))
                try:
                    await asyncio.wait((item, draining), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not item.done():
                        item.cancel()
                        await asyncio.wait((item,))
                if item.cancelled():
                    return
                yield item.result()
        finally:
            draining.cancel()


class Heart(Actor):
    """Beats for another actor: tells the bus it lives, what it waits for, and its numbers.

    A beat comes every ``interval`` seconds and its entry outlives five of them: an actor that is gone, frozen or cut
    off disappears from ``actors`` by itself.
    """

    def __init__(self, actor: Actor, *, interval: float = 2.0) -> None:
        super().__init__(f"{actor.name}.heart", actor.bus)
        self._actor = actor
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.bus.put(ACTORS, self._actor.heartbeat(), key=self._actor.name)
            await asyncio.sleep(self._interval)

    async def stop(self) -> None:
        await self.bus.forget(ACTORS, key=self._actor.name)
