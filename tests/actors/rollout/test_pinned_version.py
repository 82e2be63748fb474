"""Versions that an evaluation pins or that groups demand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout import weight_follower
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import EngineError, WeightsError
from asyncrl.messages import WeightVersion
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import until
from tests.harness.weights import Engine, announce, follow, running, sampling


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_follower, "RETRY_SECONDS", 0.01)


async def test_keeps_pinned_version_and_then_loads_newest(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine)
    changes: list[bool] = []
    async with running(follower):
        with follower.gate.watch(lambda: changes.append(follower.gate.is_behind)):
            for version in (1, 2, 3):
                await announce(bus, version, folder=True)
            await until(lambda: engine.version == (0, 3))
            async with follower.gate.pin(WeightVersion(incarnation=0, policy_version=1, uri="1")):
                assert engine.version == (0, 1)
                assert follower.gate.is_behind
                await announce(bus, 4, folder=True)
                async with sampling(follower, 0), sampling(follower, 1, is_exact=True):
                    assert engine.version == (0, 1)
                with pytest.raises(EngineError, match="but the evaluation needs"):
                    async with sampling(follower, 4, is_exact=True):
                        pass
            await until(lambda: engine.version == (0, 4))
    assert not follower.gate.is_behind
    assert changes[-1] is False and True in changes


async def test_pin_raises_if_version_cannot_be_loaded(bus: MemoryBus) -> None:
    engine = Engine(receives=False)

    def verify(weights: WeightVersion) -> Path:
        if weights.policy_version == 1:
            raise WeightsError("removed for newer versions")
        return Path("there")

    follower = follow(bus, engine, verify=verify)
    async with running(follower):
        await announce(bus, 3, folder=True)
        await until(lambda: engine.version == (0, 3))
        with pytest.raises(WeightsError, match="removed for newer versions"):
            async with follower.gate.pin(WeightVersion(incarnation=0, policy_version=1, uri="1")):
                pass
        await announce(bus, 4, folder=True)
        await until(lambda: engine.version == (0, 4))


async def test_dedicated_worker_loads_only_pinned_versions(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine, follows=False)
    async with running(follower):
        await announce(bus, 5, folder=True)
        async with follower.gate.pin(WeightVersion(incarnation=0, policy_version=2, uri="2")):
            assert engine.version == (0, 2)
        assert engine.took == [("folder", 2)]


async def test_pin_waits_for_load_in_progress(bus: MemoryBus) -> None:
    engine = SlowEngine()
    follower = follow(bus, engine)
    async with running(follower):
        await announce(bus, 1, folder=True)
        engine.may_end.set()
        await until(lambda: engine.version == (0, 1))
        engine.may_end.clear()
        engine.begun.clear()
        await announce(bus, 2, folder=True)
        await engine.begun.wait()
        pinning = follower.gate.pin(WeightVersion(incarnation=0, policy_version=1, uri="1"))
        entering = asyncio.ensure_future(pinning.__aenter__())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not entering.done()
        engine.may_end.set()
        await entering
        assert engine.version == (0, 1)
        await pinning.__aexit__(None, None, None)
        await until(lambda: engine.version == (0, 2))


class SlowEngine(Engine):
    """A load ends when the test allows it."""

    def __init__(self) -> None:
        super().__init__(receives=False)
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def load(self, weights: WeightVersion) -> Any:
        self.begun.set()
        await self.may_end.wait()
        return await super().load(weights)


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
            await announce(bus, version, folder=True, incarnation=1, resumed_from=30)
            await until(lambda: engine.version[0] == 1)
        async with asyncio.timeout(60):
            assert await sampled == (1, 31)
