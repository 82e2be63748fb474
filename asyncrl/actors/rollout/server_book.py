"""Where the servers of [servers] are: those of the run by the topic ``servers``, others as the run file says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus
from asyncrl.errors import Outage
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.roles import SERVER_FOLLOWER
from asyncrl.messages.topics import SERVERS

STALE_SECONDS = SERVERS.seconds_to_live
"""An address that was not renewed for this long is of a server that is away."""


class ServerBook(Mapping[str, ServerAddress]):
    """The address of each server by its name in the run file. Reading one that is away raises an Outage, so that the
    group that needs it waits."""

    def __init__(
        self, known: Mapping[str, ServerAddress | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """known: every server of the run file; None for one that the run starts"""
        self._known = dict(known)
        self._renewed: dict[str, float] = {}
        self._clock = clock

    def __getitem__(self, name: str) -> ServerAddress:
        """Raises KeyError for a name that is not in the run file, Outage for a server that is not up."""
        address = self._known[name]
        if address is None or self._clock() - self._renewed.get(name, self._clock()) > STALE_SECONDS:
            raise Outage(f"server {name} is not up")
        return address

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def note(self, address: ServerAddress) -> None:
        """Take in an address from the bus."""
        self._known[address.name] = address
        self._renewed[address.name] = self._clock()


class ServerFollower(Actor):
    """consumes: servers    woken by: a server of the run that starts, or renews its address"""

    role = SERVER_FOLLOWER

    def __init__(self, name: str, bus: Bus, *, book: ServerBook, servers: tuple[str, ...]) -> None:
        """servers: names of the servers that the run starts"""
        super().__init__(name, bus)
        self._book = book
        self._servers = servers

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._servers:
                group.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        async with self.bus.watch(SERVERS, key=name) as addresses:
            async for address in addresses:
                self._book.note(address)
