"""A follower that must keep one version for a while loads nothing newer until it is released."""

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
from tests.harness.weights import Engine, announce, follow, running


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_follower, "RETRY_SECONDS", 0.01)


async def test_a_version_that_is_held_is_kept_and_then_the_newest_is_loaded(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine)
    changes: list[bool] = []
    async with running(follower):
        with follower.watched(lambda: changes.append(follower.is_held_back)):
            for version in (1, 2, 3):
                await announce(bus, version, folder=True)
            await until(lambda: engine.version == (0, 3))
            async with follower.held(WeightVersion(incarnation=0, policy_version=1, uri="1")):
                assert engine.version == (0, 1)
                assert follower.is_held_back
                await announce(bus, 4, folder=True)
                async with follower.generation(0), follower.exactly((0, 1)):
                    assert engine.version == (0, 1)
                with pytest.raises(EngineError, match="but the evaluation needs"):
                    async with follower.exactly((0, 4)):
                        pass
            await until(lambda: engine.version == (0, 4))
    assert not follower.is_held_back
    assert changes[-1] is False and True in changes


async def test_a_version_that_cannot_be_loaded_is_not_held_and_nothing_else_suffers(bus: MemoryBus) -> None:
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
            async with follower.held(WeightVersion(incarnation=0, policy_version=1, uri="1")):
                pass
        await announce(bus, 4, folder=True)
        await until(lambda: engine.version == (0, 4))


async def test_who_follows_nothing_loads_what_is_held_alone(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine, follows=False)
    async with running(follower):
        await announce(bus, 5, folder=True)
        async with follower.held(WeightVersion(incarnation=0, policy_version=2, uri="2")):
            assert engine.version == (0, 2)
        assert engine.took == [("folder", 2)]


async def test_a_load_that_waits_for_its_turn_is_given_up_when_another_version_is_held(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine)
    async with running(follower):
        await announce(bus, 1, folder=True)
        await until(lambda: engine.version == (0, 1))
        async with bus.lease("load-0", holder="another"):
            await announce(bus, 2, folder=True)
            await until(lambda: "turn" in follower.heartbeat().waits_for)
            holding = follower.held(WeightVersion(incarnation=0, policy_version=1, uri="1"))
            await holding.__aenter__()
        async with bus.lease("load-0", holder="another"):  # its turn has come and gone
            assert engine.took == [("folder", 1)]
        await holding.__aexit__(None, None, None)
        await until(lambda: engine.version == (0, 2))


async def test_a_version_is_held_only_once_the_load_in_progress_is_over(bus: MemoryBus) -> None:
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
        holding = follower.held(WeightVersion(incarnation=0, policy_version=1, uri="1"))
        entering = asyncio.ensure_future(holding.__aenter__())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not entering.done()
        engine.may_end.set()
        await entering
        assert engine.version == (0, 1)
        await holding.__aexit__(None, None, None)
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
