"""What the health monitor concludes: it names the actor at fault, and never blames an actor for its own pauses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.actors import health_monitor
from asyncrl.actors.health_monitor import FaultTracker, HealthMonitor
from asyncrl.errors import BusError
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import Finding
from tests.harness import buses
from tests.harness.learning import memory_bus


def beat(name: str, number: int, *, host: str = "here", role: str = WORKER) -> Heartbeat:
    return Heartbeat(actor=name, role=role, beat=number, host=host, pid=7)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(health_monitor, "time", made)
    yield made


class Flaky:
    """A bus that can stop answering or refuse to store."""

    def __init__(self) -> None:
        self.bus = memory_bus()
        self.is_silent = self.is_full = False

    async def states(self, topic: Any) -> Any:
        if self.is_silent:
            raise BusError("no answer")
        return await self.bus.states(topic)

    async def put(self, topic: Any, message: Any, *, key: str = "") -> None:
        if self.is_silent or self.is_full:
            raise BusError("no answer" if self.is_silent else "insufficient resources")
        await self.bus.put(topic, message, key=key)

    async def forget(self, topic: Any, *, key: str) -> None:
        await self.bus.forget(topic, key=key)

    async def close(self) -> None:
        await self.bus.close()


class Watched:
    """A monitor on a bus that a test controls. Each poll comes a second after the one before."""

    def __init__(self, clock: Clock) -> None:
        self.bus, self.clock = Flaky(), clock
        self.monitor = HealthMonitor(self._connect)
        self._number = 0

    async def _connect(self) -> Any:
        return self.bus

    async def poll(self, *, seconds: float = 1.0, with_learner: bool = True) -> list[str]:
        """Return the names of the faults after ``seconds``."""
        self.clock.now += seconds
        self._number += 1
        if with_learner:
            learner = beat("learner", self._number, role=LEARNER, host="there")
            await self.bus.bus.put(ACTORS, learner, key="learner")
        return [finding.fault for finding in diagnose(await self.monitor.poll())]


@pytest.fixture
def watched(clock: Clock) -> Watched:
    return Watched(clock)


@pytest.mark.parametrize(("is_silent", "fault"), [(True, "bus"), (False, "bus storage")])
async def test_only_the_bus_is_named_while_it_is_away_or_stores_nothing(
    watched: Watched, is_silent: bool, fault: str
) -> None:
    assert await watched.poll() == []
    watched.bus.is_silent, watched.bus.is_full = is_silent, not is_silent
    named = [await watched.poll(seconds=2, with_learner=False) for _ in range(8)]
    assert named == [[], [], *[[fault]] * 6]
    watched.bus.is_silent = watched.bus.is_full = False
    for _ in range(5):  # actors need some seconds to find the bus again
        assert await watched.poll(with_learner=False) == []
    await watched.monitor.close()


async def test_monitor_leaves_nothing_behind_and_sees_that_the_run_is_finished(watched: Watched) -> None:
    await watched.bus.put(PROGRESS, buses.progress(3))
    assert not (await watched.monitor.poll()).is_finished
    assert len(await watched.bus.states(ACTORS)) == 1
    await watched.monitor.close()
    assert await watched.bus.states(ACTORS) == {}


@pytest.mark.parametrize(("is_silent", "is_full"), [(False, False), (True, False), (False, True)])
async def test_monitor_that_was_frozen_accuses_neither_actors_nor_the_bus(
    watched: Watched, is_silent: bool, is_full: bool
) -> None:
    for _ in range(2):
        await watched.poll()
    watched.bus.is_silent, watched.bus.is_full = is_silent, is_full
    watched.clock.now += 3600
    observation = await watched.monitor.poll()
    assert max(observation.bus_silent, observation.bus_refuses) < 10
    if not is_silent and not is_full:
        assert diagnose(observation) == []


def test_fault_begins_once_and_ends_when_two_polls_miss_it() -> None:
    clock = Clock()
    tracker, counts = FaultTracker(clock=clock.monotonic), []
    engine = Finding(fault="engine", actor="w0", cause="", remedy="", seconds=60.0)
    for found in ([engine], [engine], [], [engine], [], [], []):
        begun, ended = tracker.update(found)
        counts.append((len(begun), [seconds for _, seconds in ended]))
        clock.now += 1
    assert counts == [(1, []), (0, []), (0, []), (0, []), (0, []), (0, [5.0]), (0, [])]
