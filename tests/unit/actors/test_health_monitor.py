"""What the health monitor concludes: it names the actor at fault, and never blames an actor for its own pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors import health_monitor as watching
from asyncrl.actors.health_monitor import (
    AGAIN_SECONDS,
    ANSWER_SECONDS,
    HealthMonitor,
    Lasting,
    Since,
)
from asyncrl.errors import BusError
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import LEARNER, WORKER, Finding
from tests.harness import buses
from tests.harness.learning import memory_bus


def beat(name: str, number: int, *, host: str = "here", role: str = WORKER) -> Heartbeat:
    return Heartbeat(actor=name, role=role, beat=number, host=host, pid=7)


def finding(fault: str) -> Finding:
    return Finding(fault=fault, actor="w0", cause="", remedy="")


def test_a_finding_begins_once_and_ends_when_it_was_missed_twice() -> None:
    lasting = Lasting()
    said = []
    for faults in (["engine"], ["engine"], [], ["engine"], [], [], []):
        begun, ended = lasting.update([finding(fault) for fault in faults])
        said.append((len(begun), len(ended)))
    assert said == [(1, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 1), (0, 0)]


def test_a_fault_is_not_as_old_as_the_waits_it_was_concluded_from() -> None:
    """Every actor waited a minute for a worker that was working; then that worker died."""
    since = Since()
    window = replace(finding("window"), seconds=60.0, is_joint=True)
    engine = replace(finding("engine"), seconds=60.0)
    said = []
    for listened, found in ((100, [window]), (101, [window, engine]), (103, [window]), (104, []), (105, [window])):
        said.append([one.seconds for one in since.counted(found, listened)])
    assert said == [[0], [1, 60], [3], [], [0]]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(watching, "time", made)
    yield made


class Flaky:
    """A bus that can stop answering or refuse to store."""

    def __init__(self) -> None:
        self.bus = memory_bus()
        self.deaf = self.full = False

    async def states(self, topic: Any) -> Any:
        if self.deaf:
            raise BusError("no answer")
        return await self.bus.states(topic)

    async def put(self, topic: Any, message: Any, *, key: str = "") -> None:
        if self.full:
            raise BusError("insufficient resources")
        await self.bus.put(topic, message, key=key)

    async def forget(self, topic: Any, *, key: str) -> None:
        await self.bus.forget(topic, key=key)

    async def close(self) -> None:
        await self.bus.close()


async def test_while_the_bus_is_away_only_the_bus_is_named(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await bus.put(ACTORS, beat("learner", 1, role=LEARNER, host="there"), key="learner")
    await watcher.look()
    bus.deaf = True
    for _ in range(12):
        clock.now += 5
        observation = await watcher.look()
    (found,) = diagnose(observation)
    assert (found.fault, found.actor) == ("bus", "nats-server")
    assert "60 s: no answer" in found.text
    bus.deaf = False
    for _ in range(4):  # actors need some seconds to find the bus again
        clock.now += 1
        assert diagnose(await watcher.look()) == []
    await watcher.close()


async def test_a_bus_that_does_not_answer_once_is_asked_again_at_once_and_then_named(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second of pause, 3 s without an answer, 2 s for the second try: the bus is named after 6.2 s."""
    bus, given, timeout = Flaky(), [], asyncio.timeout
    watcher = HealthMonitor(lambda: _ready(bus))
    await watcher.look()
    bus.deaf = True
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: (given.append(seconds), timeout(seconds))[1])
    clock.now += 1 + ANSWER_SECONDS
    assert diagnose(await watcher.look()) == []
    clock.now += 0.2 + AGAIN_SECONDS
    (found,) = diagnose(await watcher.look())
    assert (found.fault, given) == ("bus", [ANSWER_SECONDS, AGAIN_SECONDS])
    await watcher.look()
    assert given[2:] == [ANSWER_SECONDS]  # the bus gets the usual time to come back
    await watcher.close()


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_a_bus_whose_heartbeats_cannot_be_read_in_time_is_not_to_blame(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, is_deaf: bool
) -> None:
    """Another process floods the heartbeats; the bus answers everything else. A bus that answers nothing is named."""
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(watching, "AGAIN_SECONDS", 0.01)
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await bus.put(ACTORS, beat("learner", 1, role=LEARNER, host="there"), key="learner")
    await watcher.look()
    read = bus.states

    async def states(topic: Any) -> Any:
        if topic is ACTORS or is_deaf:
            await asyncio.Event().wait()
        return await read(topic)

    bus.states = states  # type: ignore[method-assign]
    named = set()
    for _ in range(12):
        clock.now += 5
        named |= {one.fault for one in diagnose(await watcher.look())}
    assert named == ({"bus"} if is_deaf else set())


async def test_a_bus_that_stores_nothing_is_named_by_its_own_words(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await watcher.look()
    bus.full = True
    for _ in range(4):
        clock.now += 2
        observation = await watcher.look()
    (found,) = diagnose(observation)
    assert (found.fault, "8 s: insufficient resources" in found.text) == ("bus storage", True)
    await watcher.close()


async def test_a_watcher_leaves_nothing_behind_and_sees_that_the_run_is_finished() -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await bus.put(PROGRESS, buses.progress(3))
    assert not (await watcher.look()).is_finished
    assert len(await bus.states(ACTORS)) == 1
    await watcher.close()
    assert await bus.states(ACTORS) == {}


class Finishing(Flaky):
    """A bus whose learner finishes and leaves during a monitor's look."""

    async def states(self, topic: Any) -> Any:
        found = await super().states(topic)
        await self.bus.put(PROGRESS, replace(buses.progress(3), finished=True))
        await self.bus.forget(ACTORS, key="learner")
        return found


async def test_a_learner_that_finishes_during_a_look_is_not_missed(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    for number in range(10):
        clock.now += 1
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        await watcher.look()
    finishing = Finishing()
    finishing.bus = bus.bus
    bus.states = finishing.states  # type: ignore[method-assign]
    observation = await watcher.look()
    assert observation.is_finished
    assert diagnose(observation) == []
    await watcher.close()


async def test_a_learner_that_leaves_in_order_is_missed_after_some_seconds(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    for number in range(10):
        clock.now += 1
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        await watcher.look()
    await bus.forget(ACTORS, key="learner")
    named = []
    for _ in range(9):
        clock.now += 1
        named.append([one.fault for one in diagnose(await watcher.look())])
    assert named[:5] == [[]] * 5
    assert named[-1] == ["no learner"]
    await watcher.close()


async def test_nobody_is_accused_by_a_watcher_that_was_frozen_itself(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    for number in (1, 2):
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        await watcher.look()
        clock.now += 1
    clock.now += 3600
    assert diagnose(await watcher.look()) == []
    await watcher.close()


async def _ready(bus: Any) -> Any:
    await asyncio.sleep(0)
    return bus


@pytest.mark.parametrize("is_deaf", [True, False])
async def test_a_watcher_that_was_frozen_does_not_accuse_the_bus_either(clock: Clock, is_deaf: bool) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await watcher.look()
    bus.deaf, bus.full = is_deaf, not is_deaf
    clock.now += 3600
    observation = await watcher.look()
    assert max(observation.bus_silent, observation.bus_refuses) < 10
    await watcher.close()


async def test_a_bus_that_stores_nothing_is_so_for_all_the_time_though_some_looks_get_no_answer(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await watcher.look()
    bus.full = True
    for second in range(60):
        bus.deaf = second % 10 == 9
        clock.now += 1
        observation = await watcher.look()
    bus.deaf = False
    clock.now += 1
    observation = await watcher.look()
    assert observation.bus_refuses > 45
    await watcher.close()


async def test_another_life_of_the_server_is_not_accused_for_the_one_before(clock: Clock) -> None:
    bus, pid = Flaky(), 7
    watcher = HealthMonitor(lambda: _ready(bus), server=lambda: pid)
    bus.full = True
    for _ in range(10):
        clock.now += 2
        observation = await watcher.look()
    assert observation.bus_refuses > 15
    pid = 8
    clock.now += 2
    assert (await watcher.look()).bus_refuses == 0
    await watcher.close()
