"""Hears on the bus how large the fleet should be, and says there how large it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from asyncrl.errors import AsyncRLError
from asyncrl.messages.fleet import FleetSize, FleetStatus
from asyncrl.messages.topics import FLEET, FLEET_STATUS
from asyncrl.protocols import Bus

RETRY_SECONDS = 1.0
KEEP_SECONDS = 2.0

log = logging.getLogger("asyncrl.fleet_scaler")


class Sized(Protocol):
    """What keeps processes up."""

    changed: asyncio.Event
    """Set when ``status`` may be another one."""

    def resize(self, size: FleetSize) -> None: ...

    def status(self) -> FleetStatus: ...


class FleetScaler:
    """consumes: fleet    publishes: fleet_status    waits for: another size, or a change of the fleet

    A size that there was no room for is corrected to what there is, so that the fleet comes back with that size when
    the run is resumed.
    """

    def __init__(self, connect: Callable[[], Awaitable[Bus]], fleet: Sized) -> None:
        """connect: opens the bus, tried again until it works"""
        self._connect = connect
        self._fleet = fleet
        self._asked: FleetSize | None = None

    async def run(self) -> None:
        """Until cancelled. A bus that is away is waited for: the fleet keeps its size meanwhile."""
        while True:
            try:
                await self._with(await self._connect())
            except* (AsyncRLError, OSError, TimeoutError) as problem:
                log.debug("fleet size: %s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def _with(self, bus: Bus) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hear(bus))
                group.create_task(self._tell(bus))
                group.create_task(self._keep(bus))
        finally:
            await bus.close()

    async def _keep(self, bus: Bus) -> None:
        """Put the status again when somebody replaced it, and the size when the bus lost it.  waits for: the clock"""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            await bus.restore()
            if self._asked is not None and not await bus.states(FLEET):
                await bus.put(FLEET, self._asked)

    async def _hear(self, bus: Bus) -> None:
        async with bus.watch(FLEET) as sizes:
            async for size in sizes:
                self._asked = size
                self._fleet.resize(size)

    async def _tell(self, bus: Bus) -> None:
        while True:
            self._fleet.changed.clear()
            status, asked = self._fleet.status(), self._asked
            await bus.put(FLEET_STATUS, status)
            if asked is not None and asked.request == status.request:
                kept = _kept(asked, status)
                newest = (await bus.states(FLEET)).get("")  # an operator may have asked for more meanwhile
                if kept != asked and newest == asked:
                    await bus.put(FLEET, kept)
            await self._fleet.changed.wait()


def _kept(asked: FleetSize, status: FleetStatus) -> FleetSize:
    """What there is, of what was asked for."""
    return FleetSize(
        rollout_workers=None if asked.rollout_workers is None else status.rollout_workers,
        reward_workers=None if asked.reward_workers is None else status.reward_workers,
        request=status.request,
    )
