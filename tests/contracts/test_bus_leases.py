"""The contract of every Bus for leases. A holder that dies: test_jetstream.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.bus.port import Bus
from tests.harness.buses import brief_leases, long_leases

pytestmark = pytest.mark.usefixtures("no_blocking")
SOON = 60.0
"""Seconds; shorter than the time after which a dead holder loses a lease in these tests."""


@pytest.fixture(autouse=True)
def leases_that_outlive_what_is_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    long_leases(monkeypatch)
    monkeypatch.setattr("asyncrl.bus.jetstream.kv._LEAVE_SECONDS", SOON / 2)  # of a server that is slow


class Holder:
    """A client that takes a lease and holds it until told to leave."""

    def __init__(self, bus: Bus, name: str = "load") -> None:
        self.has_it = asyncio.Event()
        self.shall_leave = asyncio.Event()
        self.task = asyncio.create_task(self._hold(bus, name))

    async def _hold(self, bus: Bus, name: str) -> None:
        async with bus.lease(name, holder="somebody"):
            self.has_it.set()
            await self.shall_leave.wait()

    async def leave(self) -> None:
        self.shall_leave.set()
        await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        assert self.task.cancelled()


async def held(bus: Bus) -> Holder:
    holder = Holder(bus)
    await holder.has_it.wait()
    return holder


async def waits(bus: Bus) -> Holder:
    """Return a holder that has been waiting for a while."""
    holder = Holder(bus)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await holder.has_it.wait()
    return holder


async def gets_it_soon(waiting: Holder) -> bool:
    """Return whether it was notified. Without a notification it would look again only after a dead holder's lease
    ends."""
    try:
        async with asyncio.timeout(SOON):
            return await waiting.has_it.wait()
    except TimeoutError:
        return False


async def is_free(bus: Bus, name: str = "load") -> bool:
    """Return whether the lease can be taken before a dead holder would lose it."""
    try:
        async with asyncio.timeout(SOON), bus.lease(name, holder="x"):
            return True
    except TimeoutError:
        return False


async def test_a_lease_has_one_holder_at_a_time(bus_factory: Any) -> None:
    buses = [await bus_factory() for _ in range(4)]
    holding, turns = 0, 0

    async def take_turns(bus: Bus, name: str) -> None:
        nonlocal holding, turns
        for _ in range(5):
            async with bus.lease("load", holder=name):
                holding += 1
                assert holding == 1
                await asyncio.sleep(0)
                holding -= 1
                turns += 1

    async with asyncio.TaskGroup() as group:
        for number, bus in enumerate(buses):
            group.create_task(take_turns(bus, f"engine-{number}"))
    assert turns == 20


async def test_leases_of_different_names_are_independent(bus: Bus) -> None:
    async with bus.lease("load.0", holder="a"):
        assert await is_free(bus, "load 0")
        assert await is_free(bus, "load=2E0")
        assert await is_free(bus, "")


async def test_waiter_gets_the_lease_when_it_is_released(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    holder = await held(bus)
    waiting = await waits(other)
    await holder.leave()
    assert await gets_it_soon(waiting)
    await waiting.leave()


async def test_a_lease_is_released_when_its_holder_raises(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    with pytest.raises(RuntimeError, match="broken"):
        async with bus.lease("load", holder="a"):
            raise RuntimeError("broken")
    assert await is_free(other)


async def test_a_lease_is_released_when_its_holder_is_cancelled(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    holder = await held(bus)
    await holder.cancel()
    assert await is_free(other)


async def test_cancelled_waiter_does_not_take_the_lease(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    holder = await held(bus)
    await (await waits(other)).cancel()
    await holder.leave()
    assert await is_free(bus)


async def test_waiter_cancelled_while_taking_releases_the_lease(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    assert await is_free(bus)
    for ticks in range(30):
        holder = Holder(bus)
        for _ in range(ticks):  # a different moment of the exchange each time
            await asyncio.sleep(0)
        await holder.cancel()
        assert await is_free(other)


async def test_held_lease_is_renewed(bus_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    brief_leases(monkeypatch, seconds=2.0)
    bus, other = await bus_factory(), await bus_factory()
    holder = await held(bus)
    waiting = Holder(other)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await waiting.has_it.wait()
    await holder.leave()
    assert await waiting.has_it.wait()
    await waiting.leave()


async def test_closing_a_bus_does_not_wait_for_its_leases(bus_factory: Any) -> None:
    bus, has_closed = await bus_factory(), False
    async with asyncio.timeout(SOON):
        async with bus.lease("load", holder="a"):
            await bus.close()
            has_closed = True
    assert has_closed
