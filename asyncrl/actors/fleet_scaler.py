"""Reads the requested fleet size from the bus and reports the actual size there.

With a rule (policies/fleet_size.py) it also decides the size from the learner's metrics. It requests that size
on the bus, as `asyncrl scale` does, so that the request is applied, answered, and outlives the process like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Protocol

from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError
from asyncrl.messages import Event
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.topics import EVENTS, FLEET, FLEET_STATUS, METRICS
from asyncrl.policies.fleet_size import Change, FleetSizer

RETRY_SECONDS = 1.0

log = logging.getLogger("asyncrl.fleet_scaler")


class ResizableFleet(Protocol):
    """A fleet of processes that can be resized."""

    changed: asyncio.Event
    """Set when ``status`` may have changed."""

    def resize(self, size: FleetSize) -> None: ...

    def status(self) -> FleetStatus: ...

    def say(self, text: str) -> None: ...


class FleetScaler:
    """consumes: fleet, metrics    publishes: fleet_status, fleet    waits for: a new size, a changed fleet, a step

    If there is not enough room for a requested size, the request is corrected to the actual size, so that a resumed run
    starts with that size.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Bus]], fleet: ResizableFleet, *, rule: FleetSizer | None = None
    ) -> None:
        """connect: opens the bus, retried until it works;  rule: None leaves the size to `asyncrl scale`"""
        self._connect = connect
        self._fleet = fleet
        self._rule = rule
        self._own_request = ""
        """Request id of the last size of the rule."""
        self._requested: FleetSize | None = None

    async def run(self) -> None:
        """Run until cancelled. While the bus is away, the fleet keeps its size."""
        while True:
            try:
                await self._run_on(await self._connect())
            except* (AsyncRLError, OSError, TimeoutError) as problem:
                log.debug("fleet size: %s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def _run_on(self, bus: Bus) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_requests(bus))
                group.create_task(self._report(bus))
                if self._rule is not None:
                    group.create_task(self._decide(bus, self._rule))
        finally:
            await bus.close()

    async def _follow_requests(self, bus: Bus) -> None:
        async with bus.watch(FLEET) as sizes:
            async for size in sizes:
                self._requested = size
                self._fleet.resize(size)

    async def _decide(self, bus: Bus, rule: FleetSizer) -> None:
        newest = 0
        async with bus.watch(METRICS) as steps:
            async for row in steps:
                if row.step == newest:
                    continue
                newest, status = row.step, self._fleet.status()
                if status.problem and status.request == self._own_request:
                    rule.limit_to(status.rollout_workers)
                if (change := rule.update(row.numbers, own=status.rollout_workers)) is not None:
                    await self._request(bus, change, before=status.rollout_workers)

    async def _request(self, bus: Bus, change: Change, *, before: int) -> None:
        self._own_request = uuid.uuid4().hex
        self._fleet.say(f"rollout.most_workers: {before} -> {change.workers} rollout workers: {change.because}")
        await bus.put(FLEET, FleetSize(rollout_workers=change.workers, request=self._own_request))
        data = {"from": before, "to": change.workers, "because": change.because}
        event = Event(kind="resized", actor="fleet", time=time.time(), data=data)
        await bus.publish(EVENTS, event, key=f"resized-{self._own_request}")

    async def _report(self, bus: Bus) -> None:
        while True:
            self._fleet.changed.clear()
            status, requested = self._fleet.status(), self._requested
            await bus.put(FLEET_STATUS, status)
            if requested is not None and requested.request == status.request:
                actual = FleetSize(rollout_workers=status.rollout_workers, request=status.request)
                newest = (await bus.states(FLEET)).get("")  # an operator may have requested another size since
                if actual != requested and newest == requested:
                    await bus.put(FLEET, actual)
            await self._fleet.changed.wait()
