"""Followers and the publisher on the memory bus: what is loaded, from where, in which order, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors import weight_follower
from asyncrl.actors.weight_follower import WeightFollower
from asyncrl.actors.weight_publisher import WeightPublisher
from asyncrl.actors.weight_sender import WeightSender
from asyncrl.bus.memory import MemoryBus
from asyncrl.errors import WeightsError
from asyncrl.messages import TransferOffer, TransferRequest, WeightVersion
from asyncrl.protocols import LoadReport
from asyncrl.snapshot import Snapshot
from asyncrl.topics import SENT, TRANSFERS, WEIGHTS
from tests import fakes
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.fakes import until

pytestmark = pytest.mark.timeout(30)

SNAPSHOT = Snapshot.of([("weight", torch.zeros(4))])
TORN = (-1, -1)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_follower, "RETRY_SECONDS", 0.01)


class Sender:
    """The learner's end, without any weights; remembers which engine was sent what."""

    def __init__(self) -> None:
        self.held: tuple[int, int] | None = None
        self.groups: set[str] = set()
        self.sent: list[tuple[str, int]] = []

    def hold(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> None:
        self.held = (run_epoch, policy_version)

    def begin(self, request: TransferRequest) -> Transfer:
        if self.held is None:
            raise WeightsError("nothing yet")
        if request.has_joined and request.group not in self.groups:
            raise WeightsError("join again")
        self.groups.add(request.group)
        if request.has_joined:
            self.sent.append((request.engine, self.held[1]))
        return Transfer(TransferOffer(host="here", port=1, run_epoch=self.held[0], policy_version=self.held[1]))

    def forget(self, *, engines: Collection[str]) -> None:
        pass


class Transfer:
    def __init__(self, offer: TransferOffer) -> None:
        self.offer = offer

    def send(self) -> None:
        pass


class Receiver:
    """Takes what is offered into its engine. ``fails``: nothing arrives; ``tears``: half of it does."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._lives = 1
        self._has_joined = False
        self.fails = self.tears = False
        self.joins: list[str] = []

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._name, group=f"{self._name}-{self._lives}", num_ranks=1, has_joined=self._has_joined
        )

    async def join(self, offer: TransferOffer) -> None:
        self.joins.append(self.request.group)
        self._has_joined = True

    async def receive(self, offer: TransferOffer) -> LoadReport:
        if self.fails or self.tears:
            self._engine.version = TORN if self.tears else self._engine.version
            await self.leave()
            raise WeightsError("the learner left")
        return await self._engine.switch("sent", offer.order)

    async def leave(self) -> None:
        self._lives += 1
        self._has_joined = False


class Engine(fakes.Engine):
    """Remembers where its weights came from; ``gate`` holds loads back while it is clear."""

    def __init__(self, name: str = "w0", *, receives: bool = True) -> None:
        super().__init__()
        self.receiver: Any = Receiver(self, name) if receives else None
        self.took: list[tuple[str, int]] = []
        self.is_paused = False

    async def load(self, weights: WeightVersion) -> LoadReport:
        if weights.policy_version in self.unreadable:
            raise WeightsError("torn")
        return await self.switch("folder", weights.order)

    async def switch(self, source: str, order: tuple[int, int]) -> LoadReport:
        self.is_paused = True
        await self.gate.wait()
        self.is_paused = False
        self.version = order
        self.took.append((source, order[1]))
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)


async def announce(bus: MemoryBus, version: int, *, folder: bool, run_epoch: int = 0, num_engines: int = 0) -> None:
    weights = WeightVersion(run_epoch=run_epoch, policy_version=version, num_engines=num_engines)
    await (bus.put(WEIGHTS, replace(weights, uri="folder")) if folder else bus.put(WEIGHTS, weights, key=SENT))


async def hold(bus: MemoryBus, sender: Sender, version: int, *, run_epoch: int = 0) -> None:
    sender.hold(SNAPSHOT, run_epoch=run_epoch, policy_version=version)
    await announce(bus, version, folder=False, run_epoch=run_epoch)


@contextlib.asynccontextmanager
async def learner(bus: MemoryBus, sender: Sender) -> AsyncIterator[None]:
    actor = WeightSender("weights", bus, sender=sender)
    async with running(actor):
        while await bus.ask(TRANSFERS, TransferRequest(engine="?", group="?", num_ranks=1), seconds=1) is None:
            await asyncio.sleep(0)  # until it serves
        yield


@contextlib.asynccontextmanager
async def running(*actors: Any) -> AsyncIterator[None]:
    """What an actor raises ends the test."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for actor in actors:
            await actor.start()
            tasks.append(group.create_task(actor.run()))
        yield
        for task in tasks:
            task.cancel()


def follow(bus: MemoryBus, engine: Engine, *, name: str = "w0", load: str = "in_flight") -> WeightFollower:
    def verify(weights: WeightVersion) -> Path:
        return Path(weights.uri)

    return WeightFollower(f"{name}.weights", bus, engine=engine, verify=verify, load=load)


# -- from where --------------------------------------------------------------------------------------------------------


async def test_what_the_learner_sends_is_preferred_to_its_folder(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    async with learner(bus, sender), running(follow(bus, engine)):
        await announce(bus, 1, folder=True)
        await hold(bus, sender, 2)
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))
        await hold(bus, sender, 3)
        await until(lambda: engine.version == (0, 3))
    assert engine.took[-2:] == [("sent", 2), ("sent", 3)]


async def test_an_engine_that_cannot_receive_loads_folders(bus: MemoryBus) -> None:
    engine, sender = Engine(receives=False), Sender()
    async with learner(bus, sender), running(follow(bus, engine)):
        await hold(bus, sender, 2)
        await announce(bus, 1, folder=True)
        await until(lambda: engine.version == (0, 1))
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))
    assert engine.took == [("folder", 1), ("folder", 2)]


async def test_nobody_answers_so_the_folder_is_taken(bus: MemoryBus) -> None:
    engine = Engine()
    await announce(bus, 1, folder=True)
    await announce(bus, 1, folder=False)
    async with running(follow(bus, engine)):
        await until(lambda: engine.version == (0, 1))
    assert engine.took == [("folder", 1)]


@pytest.mark.parametrize("load", ["in_flight", "drain"])
async def test_sending_fails_and_the_folder_is_taken_when_it_is_written(bus: MemoryBus, load: str) -> None:
    """The folder of a large model comes minutes later: until then the old weights go on, and nothing dies."""
    engine, sender = Engine(), Sender()
    engine.receiver.fails = True
    follower = follow(bus, engine, load=load)
    async with learner(bus, sender), running(follower):
        await hold(bus, sender, 1)
        await until(lambda: sender.sent == [("w0", 1)])
        async with follower.generation(0):
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


async def test_what_cannot_be_sent_is_soon_not_asked_for(bus: MemoryBus) -> None:
    """Engines that never can meet the learner do not lose time with every version."""
    engine, sender = Engine(), Sender()
    engine.receiver.fails = True
    async with learner(bus, sender), running(follow(bus, engine)):
        for version in range(1, weight_follower.ATTEMPTS + 3):
            await hold(bus, sender, version)
            await announce(bus, version, folder=True)
            await until(lambda version=version: engine.version == (0, version))  # type: ignore[misc]
    assert len(sender.sent) == weight_follower.ATTEMPTS
    assert [kind for kind, _ in engine.took] == ["folder"] * (weight_follower.ATTEMPTS + 2)


async def test_an_older_folder_is_better_than_none(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    engine.receiver.fails = True
    await announce(bus, 1, folder=True)
    async with learner(bus, sender), running(follow(bus, engine)):
        await hold(bus, sender, 2)
        await until(lambda: engine.version == (0, 1))
    assert engine.took == [("folder", 1)]


@pytest.mark.parametrize("newest", ["sent", "folder"])
async def test_the_newest_of_both_wins(bus: MemoryBus, newest: str) -> None:
    """A folder is newer than what is sent when another learner wrote it, which sends nothing."""
    engine, sender = Engine(), Sender()
    sender.hold(SNAPSHOT, run_epoch=0, policy_version=5)
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


async def test_versions_that_came_while_one_was_loaded_are_skipped(bus: MemoryBus) -> None:
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


async def test_a_folder_that_nobody_can_read_ends_the_worker(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    engine.unreadable = {1}
    await announce(bus, 1, folder=True)
    with pytest.raises(ExceptionGroup) as raised:
        await follow(bus, engine).run()
    assert raised.group_contains(WeightsError, match="torn")


async def test_a_folder_that_nobody_can_read_is_passed_by_for_a_newer_version(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    engine.unreadable = {1}
    async with running(follow(bus, engine)):
        await announce(bus, 1, folder=True)
        await asyncio.sleep(0)
        await announce(bus, 2, folder=True)
        await until(lambda: engine.version == (0, 2))


# -- meeting the learner -----------------------------------------------------------------------------------------------


async def test_the_learner_is_met_before_anything_runs(bus: MemoryBus) -> None:
    engine, sender = Engine(), Sender()
    async with learner(bus, sender):
        await hold(bus, sender, 0)
        await follow(bus, engine).start()
    assert engine.receiver.joins == ["w0-1"]
    assert engine.took == [("sent", 0)]


async def test_a_start_without_a_learner_meets_nobody(bus: MemoryBus) -> None:
    engine = Engine()
    await follow(bus, engine).start()
    await announce(bus, 0, folder=False)  # of one that is gone
    await follow(bus, engine).start()
    assert engine.took == engine.receiver.joins == []


async def test_an_engine_torn_at_its_start_takes_the_folder_of_the_version_it_began_with(bus: MemoryBus) -> None:
    """It is paused, and no newer version comes before its own answers are trained."""
    engine, sender = Engine(), Sender()
    engine.receiver.tears = True
    follower = follow(bus, engine)
    await announce(bus, 0, folder=True)
    async with learner(bus, sender):
        await hold(bus, sender, 0)
        async with running(follower), follower.generation(0):
            assert engine.version == (0, 0)
    assert engine.took == [("folder", 0)]


async def test_another_life_of_the_learner_is_met_anew(bus: MemoryBus) -> None:
    engine, first, second = Engine(), Sender(), Sender()
    async with running(follow(bus, engine)):
        async with learner(bus, first):
            await hold(bus, first, 3)
            await until(lambda: engine.version == (0, 3))
        async with learner(bus, second):
            await hold(bus, second, 2, run_epoch=1)  # refused: it knows no such group
            await announce(bus, 2, folder=True, run_epoch=1)
            await until(lambda: engine.version == (1, 2))
            await hold(bus, second, 3, run_epoch=1)
            await until(lambda: engine.version == (1, 3))
    assert engine.receiver.joins == ["w0-1", "w0-2"]
    assert engine.took[-1] == ("sent", 3)


# -- the learner's end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["fails", "never ends"])
async def test_a_transfer_that_goes_wrong_keeps_nobody_else_waiting(bus: MemoryBus, fate: str) -> None:
    """Nor the learner's exit."""
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
        sender.hold(SNAPSHOT, run_epoch=0, policy_version=1)
        offer = await bus.ask(TRANSFERS, TransferRequest(engine="w0", group="w0-1", num_ranks=1), seconds=10)
        assert offer is not None and offer.order == (0, 1)
        await hold(bus, sender, 2)
        await until(lambda: engine.version == (0, 2))
    over.set()


async def test_an_engine_is_told_why_nothing_is_sent(bus: MemoryBus) -> None:
    async with learner(bus, Sender()):
        offer = await bus.ask(TRANSFERS, TransferRequest(engine="w0", group="w0-1", num_ranks=1), seconds=10)
    assert offer is not None and "nothing yet" in offer.problem


# -- taking turns ------------------------------------------------------------------------------------------------------


async def most_paused_at_once(bus: MemoryBus, num_engines: int, *, load: str = "in_flight") -> int:
    """Every load waits until nobody else can begin one."""
    engines = [Engine(f"w{n}", receives=n % 2 == 0) for n in range(num_engines)]
    for engine in engines:
        engine.gate.clear()
    sender = Sender()
    sender.hold(SNAPSHOT, run_epoch=0, policy_version=1)
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
    """Everybody who may begin to load has begun: the set of paused engines stays as it is."""
    quiet, paused = 0, -1
    while quiet < 100:
        await asyncio.sleep(0.0002)
        now = sum(engine.is_paused and not engine.gate.is_set() for engine in engines)
        waits = any(engine.version == (0, 1) for engine in engines) or now
        quiet = quiet + 1 if now == paused and waits else 0
        paused = now


@pytest.mark.parametrize(("num_engines", "most"), [(16, 2), (3, 1)])
async def test_an_eighth_of_the_engines_load_at_once(bus: MemoryBus, num_engines: int, most: int) -> None:
    assert await most_paused_at_once(bus, num_engines) == most


@pytest.mark.parametrize("load", ["drain", "on_demand"])
async def test_engines_that_are_quiet_wait_for_no_turn(bus: MemoryBus, load: str) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine, load=load)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(bus.lease("load-0", holder="another"))
        async with running(follower):
            await announce(bus, 1, folder=True)
            async with follower.generation(1):
                assert engine.version == (0, 1)


async def test_an_engine_that_generates_waits_for_its_turn_and_says_so(bus: MemoryBus) -> None:
    engine = Engine(receives=False)
    follower = follow(bus, engine)
    async with running(follower):
        async with bus.lease("load-0", holder="another"):
            await announce(bus, 1, folder=True)
            await until(lambda: "turn" in follower.heartbeat().waits_for)
            assert engine.version == (0, 0)
        await until(lambda: engine.version == (0, 1))


# -- the publisher -----------------------------------------------------------------------------------------------------


class Channel(fakes.Channel):
    """Writes a version when it is told to."""

    def __init__(self, sender: Sender | None) -> None:
        self.sender: Any = sender
        self.may_write = threading.Semaphore(0)
        self.writing: list[int] = []

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        self.writing.append(policy_version)
        assert self.may_write.acquire(timeout=20)
        return super().publish(snapshot, run_epoch=run_epoch, policy_version=policy_version)


class Recorded(MemoryBus):
    """Remembers what was announced."""

    def __init__(self) -> None:
        super().__init__(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        self.announced: list[tuple[str, int]] = []

    async def put(self, topic: Any, message: Any, *, key: str = "") -> None:
        await super().put(topic, message, key=key)
        self.announced.append((key or "folder", message.policy_version))


@contextlib.asynccontextmanager
async def publishing(channel: Channel) -> AsyncIterator[tuple[Recorded, WeightPublisher, Any]]:
    """A publisher, and ``publish(version)``."""
    bus = Recorded()
    publisher = WeightPublisher(bus, channel)
    async with asyncio.TaskGroup() as group:

        async def publish(version: int) -> None:
            await publisher.publish(SNAPSHOT, run_epoch=0, policy_version=version, group=group)

        yield bus, publisher, publish
    publisher.close()


async def test_what_is_held_is_announced_before_its_folder_is_written() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        assert bus.announced == [("sent", 1)]
        assert channel.sender.held == (0, 1)
        channel.may_write.release()
        await publisher.wait()
        assert bus.announced == [("sent", 1), ("folder", 1)]


async def test_the_newest_version_is_written_next_and_those_between_never() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        await until(lambda: channel.writing == [1])
        for version in (2, 3, 4):
            await publish(version)
        channel.may_write.release(2)
        await publisher.wait()
    assert channel.writing == [1, 4]
    assert bus.announced == [("sent", 1), ("sent", 2), ("sent", 3), ("sent", 4), ("folder", 1), ("folder", 4)]


async def test_who_waits_waits_for_the_newest_version() -> None:
    channel = Channel(None)
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        await until(lambda: channel.writing == [1])
        waiting = asyncio.create_task(publisher.wait())
        await publish(2)
        channel.may_write.release()
        await until(lambda: channel.writing == [1, 2])
        assert not waiting.done()
        channel.may_write.release()
        await waiting
        assert bus.announced == [("folder", 1), ("folder", 2)]


async def test_a_channel_without_a_sender_announces_folders_only() -> None:
    channel = Channel(None)
    async with publishing(channel) as (bus, publisher, publish):
        assert not publisher.sends
        for version in (1, 2):
            await publish(version)
            channel.may_write.release()
            await publisher.wait()
    assert bus.announced == [("folder", 1), ("folder", 2)]


async def test_every_announcement_says_how_many_engines_take_turns() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        publisher.num_engines = 16
        channel.may_write.release()
        await publish(1)
        await publisher.wait()
        assert {weights.num_engines for weights in (await bus.states(WEIGHTS)).values()} == {16}
