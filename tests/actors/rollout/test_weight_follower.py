"""Followers on the memory bus: which versions are loaded, from where, in which order, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from asyncrl.actors.learner.weight_publisher import WeightPublisher
from asyncrl.actors.rollout import load_gate, weight_follower
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.topics import TRANSFERS, WEIGHTS
from asyncrl.messages.weight_transfer import TransferRequest
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import Channel, until
from tests.harness.weights import SNAPSHOT, Engine, Sender, Transfer, announce, follow, hold, learner, running, sampling


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_follower, "RETRY_SECONDS", 0.01)


# -- from where --------------------------------------------------------------------------------------------------------


async def test_prefers_memory_of_learner_to_its_folder(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    async with learner(bus, sender), running(follow(bus, engine)):
        await announce(bus, 1, folder=True)
        await hold(bus, sender, 2)
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))
        await hold(bus, sender, 3)
        await until(lambda: engine.version == (0, 3))
    assert engine.took[-2:] == [("sent", 2), ("sent", 3)]


async def test_loads_folders_if_engine_cannot_receive(bus: MemoryBus) -> None:
    engine, sender = Engine(receives=False), Sender()
    async with learner(bus, sender), running(follow(bus, engine)):
        await hold(bus, sender, 2)
        await announce(bus, 1, folder=True)
        await until(lambda: engine.version == (0, 1))
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))
    assert engine.took == [("folder", 1), ("folder", 2)]


async def test_loads_folder_if_no_learner_answers(bus: MemoryBus) -> None:
    engine = Engine()
    await announce(bus, 1, folder=True)
    await announce(bus, 1, folder=False)
    async with running(follow(bus, engine)):
        await until(lambda: engine.version == (0, 1))
    assert engine.took == [("folder", 1)]


@pytest.mark.parametrize("load", ["in_flight", "drain"])
async def test_loads_folder_once_written_if_transfer_fails(
    bus: MemoryBus, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a large model arrives minutes later. Until then the old weights stay in use, and no worker dies."""
    monkeypatch.setattr(load_gate, "STARVED_SECONDS", 1e6)
    engine, sender = Engine(), Sender()
    engine.receiver.fails = True
    follower = follow(bus, engine, load=load)
    async with learner(bus, sender), running(follower):
        await hold(bus, sender, 1)
        await until(lambda: sender.sent == [("w0", 1)])
        async with sampling(follower, 0):
            pass
        for _ in range(20 * weight_follower.ATTEMPTS):
            await asyncio.sleep(weight_follower.RETRY_SECONDS / 10)
        assert sender.sent == [("w0", 1)]
        await announce(bus, 1, folder=True)
        await until(lambda: engine.version == (0, 1))
        engine.receiver.fails = False
        await hold(bus, sender, 2)
        await until(lambda: engine.version == (0, 2))
    assert engine.took == [("folder", 1), ("sent", 2)]


class OnDemand(Channel):
    """The learner's end of a channel that stores no folder unless it is asked for."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def must_store(self, policy_version: int) -> bool:
        return False


@pytest.mark.parametrize("receives", [True, False])
async def test_folders_are_written_for_an_engine_that_cannot_receive_weights(bus: MemoryBus, receives: bool) -> None:
    """Be it that its transfer fails, or that it has no way to receive any. Nothing else would bring it new weights."""
    engine, sender = Engine(receives=receives), Sender()
    if receives:
        engine.receiver.tears = True
    publisher = WeightPublisher(bus, OnDemand(sender))
    async with learner(bus, sender, publisher), running(follow(bus, engine)), asyncio.TaskGroup() as group:
        for version in (1, 2):
            await publisher.publish(SNAPSHOT, incarnation=0, policy_version=version, num_engines=1, group=group)
            await until(lambda version=version: engine.version == (0, version))
    publisher.close()
    assert set(engine.took) == {("folder", 1), ("folder", 2)}


async def test_an_engine_that_cannot_receive_weights_asks_for_a_folder_until_the_learner_answers(
    bus: MemoryBus,
) -> None:
    """The learner may be busy, or not serve yet, and no further version comes while it waits for this engine."""
    engine, sender = Engine(receives=False), Sender()
    publisher = WeightPublisher(bus, OnDemand(sender))
    async with running(follow(bus, engine)), asyncio.TaskGroup() as group:
        await publisher.publish(SNAPSHOT, incarnation=0, policy_version=1, num_engines=1, group=group)
        await asyncio.sleep(3 * weight_follower.RETRY_SECONDS)
        async with learner(bus, sender, publisher):
            await until(lambda: engine.version == (0, 1))
    publisher.close()
    assert engine.took == [("folder", 1)]


async def test_while_no_learner_answers_an_engine_takes_the_newest_folder_and_tries_again_until_one_does(
    bus: MemoryBus,
) -> None:
    engine, sender = Engine(), Sender()
    follower = follow(bus, engine)
    await announce(bus, 1, folder=True)  # of the last checkpoint, say
    async with running(follower):
        await hold(bus, sender, 2)
        await until(lambda: follower.problem == "no learner answers the request for weights")
        assert engine.took == [("folder", 1)]
        assert follower.failed_attempts == 0  # which would say that its folders cannot be read
        async with learner(bus, sender):
            await until(lambda: engine.version == (0, 2))
    assert engine.took == [("folder", 1), ("sent", 2)]


@pytest.mark.parametrize("newest", ["sent", "folder"])
async def test_loads_newest_of_memory_and_folder(bus: MemoryBus, newest: str) -> None:
    """A folder is newer than the offer when another learner wrote it, which offers nothing."""
    engine, sender = Engine(), Sender()
    sender.set_weights(SNAPSHOT, incarnation=0, policy_version=5)
    await announce(bus, 5, folder=newest != "sent")
    await announce(bus, 4, folder=newest == "sent")
    follower = follow(bus, engine)
    if newest == "sent":
        async with learner(bus, sender), running(follower):
            await until(lambda: engine.version == (0, 5))
    else:
        async with running(follower):
            await until(lambda: engine.version == (0, 5))
    assert engine.took[-1] == (newest, 5)


async def test_skips_versions_announced_during_a_load(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    async with learner(bus, sender), running(follow(bus, engine)):
        engine.gate.clear()
        await hold(bus, sender, 1)
        await until(lambda: engine.is_paused)
        for version in (2, 3, 4):
            await hold(bus, sender, version)
        engine.gate.set()
        await until(lambda: engine.version == (0, 4))
    assert engine.took == [("sent", 1), ("sent", 4)]


async def test_waits_for_missing_folder_without_end(bus: MemoryBus) -> None:
    engine, tries = Engine(receives=False), 0

    def verify(weights: WeightVersion) -> Path:
        nonlocal tries
        tries += 1
        if weights.uri != "again":
            raise WeightsError("not in the object store")
        return Path()

    follower = follow(bus, engine, verify=verify)
    await announce(bus, 1, folder=True)
    async with running(follower):
        await until(lambda: tries > 2 * weight_follower.ATTEMPTS)
        assert follower.problem == "not in the object store"
        await until(lambda: [wait.on for wait in follower.present_waits()] == [LEARNER])
        found = (await bus.states(WEIGHTS))[""]
        await bus.put(WEIGHTS, replace(found, uri="again"))
        await until(lambda: engine.version == (0, 1))
    assert follower.problem == ""


async def test_ends_worker_if_engine_cannot_load_folder(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    engine.unreadable = {1}
    await announce(bus, 1, folder=True)
    with pytest.raises(ExceptionGroup) as raised:
        await follow(bus, engine).run()
    assert raised.group_contains(WeightsError, match="torn")


async def test_skips_unreadable_folder_for_newer_version(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    engine.unreadable = {1}
    async with running(follow(bus, engine)):
        await announce(bus, 1, folder=True)
        await asyncio.sleep(0)
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))
    assert engine.took == [("folder", 2)]


# -- connecting to the learner -----------------------------------------------------------------------------------------


async def test_joins_learner_before_anything_runs(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    async with learner(bus, sender):
        await hold(bus, sender, 0)
        await follow(bus, engine).start()
    assert engine.receiver.joins == ["w0-1"]
    assert engine.took == [("sent", 0)]


async def test_joins_restarted_learner_again(bus: MemoryBus) -> None:
    engine, first, second = Engine(), Sender(), Sender()
    async with running(follow(bus, engine)):
        async with learner(bus, first):
            await hold(bus, first, 3)
            await until(lambda: engine.version == (0, 3))
        async with learner(bus, second):
            await hold(bus, second, 2, incarnation=1)  # refused: the learner knows no such group
            await announce(bus, 2, folder=True, incarnation=1)
            await until(lambda: engine.version == (1, 2))
            await hold(bus, second, 3, incarnation=1)
            await until(lambda: engine.version == (1, 3))
    assert engine.receiver.joins == ["w0-1", "w0-2"]
    assert engine.took[-1] == ("sent", 3)


# -- the learner's end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["fails", "never ends"])
async def test_failed_transfer_does_not_delay_other_engines(bus: MemoryBus, fate: str) -> None:
    """Nor does it delay the learner's exit."""
    over = threading.Event()

    class Wrong(Sender):
        def begin(self, request: TransferRequest) -> Transfer:
            transfer = super().begin(request)
            if request.engine == "w0":
                transfer.send = fail if fate == "fails" else over.wait  # type: ignore[method-assign, assignment]
            return transfer

    def fail() -> None:
        raise WeightsError("the engine is gone")

    sender, engine = Wrong(), Engine("w1")
    async with learner(bus, sender), running(follow(bus, engine, name="w1")):
        sender.set_weights(SNAPSHOT, incarnation=0, policy_version=1)
        offer = await bus.ask(TRANSFERS, TransferRequest(engine="w0", group="w0-1", num_ranks=1), seconds=60)
        assert offer is not None and offer.version == (0, 1)
        await hold(bus, sender, 2)
        await until(lambda: engine.version == (0, 2))
    over.set()


# -- turns -------------------------------------------------------------------------------------------------------------


async def most_paused_at_once(bus: MemoryBus, num_engines: int, *, load: str = "in_flight") -> int:
    """Return the most engines that were paused at once. Every load waits until no further load can begin."""
    engines = [Engine(f"w{n}", receives=n % 2 == 0) for n in range(num_engines)]
    for engine in engines:
        engine.gate.clear()
    sender = Sender()
    sender.set_weights(SNAPSHOT, incarnation=0, policy_version=1)
    most = 0
    async with learner(bus, sender):
        followers = [follow(bus, engine, name=f"w{n}", load=load) for n, engine in enumerate(engines)]
        async with running(*followers):
            await announce(bus, 1, folder=True, num_engines=num_engines)
            await announce(bus, 1, folder=False, num_engines=num_engines)
            while any(engine.version != (0, 1) for engine in engines):
                await settled(engines)
                most = max(most, sum(engine.is_paused for engine in engines))
                next(engine for engine in engines if engine.is_paused).gate.set()
                await asyncio.sleep(0)
    return most


async def settled(engines: list[Engine]) -> None:
    """Wait until every load that may begin has begun: the set of paused engines stays the same."""
    quiet, paused = 0, -1
    while quiet < 100:
        await asyncio.sleep(0.0002)
        now = sum(engine.is_paused and not engine.gate.is_set() for engine in engines)
        waits = any(engine.version == (0, 1) for engine in engines) or now
        quiet = quiet + 1 if now == paused and waits else 0
        paused = now


@pytest.mark.parametrize(("num_engines", "most"), [(16, 2), (3, 1)])
async def test_at_most_an_eighth_of_engines_load_at_once(bus: MemoryBus, num_engines: int, most: int) -> None:
    assert await most_paused_at_once(bus, num_engines) == most


@pytest.mark.parametrize("load", ["drain", "on_demand"])
async def test_idle_engines_take_no_turns(bus: MemoryBus, load: str) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine, load=load)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(bus.lease("load-0", holder="another"))
        async with running(follower):
            await announce(bus, 1, folder=True)
            async with sampling(follower, 1):
                assert engine.version == (0, 1)


async def test_generating_engine_reports_wait_for_its_turn(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine)
    async with running(follower):
        async with bus.lease("load-0", holder="another"):
            await announce(bus, 1, folder=True)
            await until(lambda: "turn" in follower.heartbeat().waits_for)
            assert engine.version == (0, 0)
        await until(lambda: engine.version == (0, 1))
