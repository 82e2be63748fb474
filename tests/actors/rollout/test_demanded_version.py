"""Which versions a follower loads that loads on demand, after the learner fell back to a checkpoint."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import until
from tests.harness.weights import Engine, announce, follow, running, sampling


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


async def test_demand_ends_with_its_history(bus: MemoryBus) -> None:
    """Version 50 was demanded of a history that was lost. The new one begins at 30, and nobody demands more."""
    engine = Engine(receives=False)
    follower = follow(bus, engine, load="on_demand")
    async with running(follower):
        await announce(bus, 50, folder=True)
        async with sampling(follower, 50):
            pass
        await announce(bus, 30, folder=True, incarnation=1)
        await until(lambda: engine.version == (1, 30))
        await announce(bus, 31, folder=True, incarnation=1)
        await until(lambda: follower.versions.newest == (1, 31))
        async with sampling(follower, 30, incarnation=1):
            assert engine.version == (1, 30)


async def test_waiting_group_demands_version_of_new_history(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine, load="on_demand")

    async def sample() -> tuple[int, int]:
        async with sampling(follower, 50):
            return engine.version

    async with running(follower):
        await announce(bus, 49, folder=True)
        await until(lambda: follower.versions.newest == (0, 49))
        sampled = asyncio.ensure_future(sample())
        await until(lambda: engine.version == (0, 49))
        for version in (30, 31):  # the learner fell back to 30; max_staleness is 0, so the group waits for 31
            await announce(bus, version, folder=True, incarnation=1, fork=30)
            await until(lambda: engine.version[0] == 1)
        async with asyncio.timeout(60):
            assert await sampled == (1, 31)
