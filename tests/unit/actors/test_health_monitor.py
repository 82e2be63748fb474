"""What a watcher makes of what it hears: ages on its own clock, and who left, died, or starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors import health_monitor as watching
from asyncrl.actors import recent_losses
from asyncrl.actors.health_monitor import (
    AGAIN_SECONDS,
    ANSWER_SECONDS,
    HealthMonitor,
    Lasting,
    Since,
)
from asyncrl.actors.presence import WATCHER, Launched, PresenceTracker, process_state
from asyncrl.cli import doctor
from asyncrl.errors import BusError, NoAnswer, NoSuchRun
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import LEARNER, WORKER, Finding, Observation
from asyncrl.protocols import Loss
from tests.harness import buses
from tests.harness.learning import memory_bus


def beat(name: str, number: int, *, pid: int = 7, host: str = "here", role: str = WORKER) -> Heartbeat:
    return Heartbeat(actor=name, role=role, beat=number, host=host, pid=pid)


def tracker() -> PresenceTracker:
    return PresenceTracker(host="here", process=lambda pid: "stopped")


def test_who_does_not_beat_any_more_gets_older_only_while_we_listen() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    assert heard.present()["w0"].seconds == 0
    for _ in range(7):
        heard.hear({"w0": beat("w0", 2)}, seconds=1)
    assert (heard.present()["w0"].seconds, heard.present()["w0"].process) == (7, "stopped")
    heard.hear({"w0": beat("w0", 3)}, seconds=1)
    assert heard.present()["w0"].seconds == 0


@pytest.mark.parametrize("looks", [({"w0": 1}, {"w0": 2}), ({}, {"w0": 1})])
def test_who_takes_its_entry_away_left_in_order(looks: tuple[dict[str, int], ...]) -> None:
    heard = tracker()
    for look in looks:
        heard.hear({name: beat(name, number) for name, number in look.items()}, seconds=1)
    heard.hear({}, seconds=1)
    assert heard.present() == {}


@pytest.mark.parametrize("numbers", [(1,), (1, 2, 2, 2, 2, 2, 2, 2, 2)])
def test_whose_entry_expired_is_missed_for_a_minute(numbers: tuple[int, ...]) -> None:
    heard = tracker()
    for number in numbers:  # a single beat may have been old when it was heard
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    heard.hear({}, seconds=1)
    assert heard.present()["w0"].seconds >= 15
    for _ in range(60):
        heard.hear({}, seconds=1)
    assert heard.present() == {}


def test_who_is_silent_while_others_beat_gets_older_by_their_beats_where_looks_are_far_apart() -> None:
    """A busy machine: the watcher looks every five seconds, of which it may count two by its own clock. w1 beats."""
    heard = tracker()
    for number in (1, 2):
        beats = {"w0": beat("w0", number), "w0.weights": beat("w0.weights", number), "w1": beat("w1", number, pid=8)}
        heard.hear(beats, seconds=2, elapsed=5)
    heard.hear(beats | {"w1": beat("w1", 4, pid=8)}, seconds=2, elapsed=5)
    assert [heard.present()[name].seconds for name in ("w0", "w0.weights", "w1")] == [4, 4, 0]
    heard.hear(beats | {"w1": beat("w1", 9, pid=8)}, seconds=2, elapsed=5)
    assert [heard.present()[name].seconds for name in ("w0", "w0.weights", "w1")] == [9, 9, 0]
    heard.hear(beats | {"w1": beat("w1", 9, pid=8)}, seconds=2, elapsed=60)  # all were frozen
    assert [heard.present()[name].seconds for name in ("w0", "w1")] == [11, 2]


def test_an_entry_that_expired_between_looks_that_are_far_apart_is_missed() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    for _ in range(2):
        heard.hear({"w0": beat("w0", 2)}, seconds=2, elapsed=7)
    heard.hear({}, seconds=2, elapsed=7)
    assert heard.present()["w0"].seconds >= 6


def test_an_entry_that_expired_while_the_bus_was_away_is_as_old_as_the_bus_is_back() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    heard.excuse()
    for second in range(1, 9):
        heard.hear({}, seconds=1)
        assert heard.present()["w0"].seconds == second


def test_a_process_started_again_is_not_blamed_for_the_one_before() -> None:
    heard = tracker()
    beats = {"w0": beat("w0", 5, pid=7), "w0.weights": beat("w0.weights", 5, pid=7)}
    one = Launched(name="w0", role=WORKER, pid=7, seconds=9)
    heard.hear(beats, seconds=1, launched=[one])
    heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=2)])
    for seconds in (20, 40):
        heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=seconds)])
        (seen,) = heard.present().values()
        assert (seen.beat.pid, seen.beat.phase, seen.beat.waits[0].seconds) == (8, "starting", seconds)
        beats = {}
    beats["w0"] = beat("w0", 1, pid=8)
    heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=3)])
    assert [seen.beat.phase for seen in heard.present().values()] == ["running"]


@pytest.mark.parametrize("is_leaving", [True, False])
def test_who_takes_its_entry_away_and_is_still_a_process_is_not_starting(is_leaving: bool) -> None:
    """Its whole life would count as its start, and it would be killed while it ends in order."""
    heard = tracker()
    one = Launched(name="w0", role=WORKER, pid=7, seconds=700)
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1, launched=[one])
    heard.hear({}, seconds=1, launched=[replace(one, is_leaving=is_leaving)])
    assert heard.present() == {}


@pytest.mark.parametrize(("host", "is_named"), [("here", False), ("elsewhere", True)])
def test_what_a_killed_life_of_the_run_left_on_this_machine_is_not_accused(host: str, is_named: bool) -> None:
    heard = PresenceTracker(host="here", process=lambda pid: "gone" if pid == 3 else "running")
    own = Launched(name="learner", role="learner", pid=8, seconds=1)
    for _ in range(20):
        left = {"prompts": beat("prompts", 5, pid=3, host=host)}
        heard.hear(left | {"learner": beat("learner", 1, pid=8)}, seconds=1, launched=[own])
    assert ("prompts" in heard.present()) == is_named


def test_who_beats_on_is_heard_though_this_machine_knows_no_such_process() -> None:
    heard = PresenceTracker(
        host="here", process=lambda pid: "gone" if pid == 3 else "running"
    )  # of another container, say
    own = Launched(name="learner", role="learner", pid=8, seconds=1)
    for number in range(20):
        beats = {"w9": beat("w9", min(number, 10), pid=3), "learner": beat("learner", number + 1, pid=8)}
        heard.hear(beats, seconds=1, launched=[own])
    assert heard.present()["w9"].seconds == 9


def test_who_leaves_before_it_was_heard_is_not_starting() -> None:
    heard = tracker()
    heard.hear({}, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=7, seconds=700, is_leaving=True)])
    assert heard.present() == {}


def test_an_own_process_that_fell_silent_is_missed_for_as_long_as_it_is_there() -> None:
    heard = tracker()
    one = Launched(name="w0", role=WORKER, pid=7, seconds=700)
    for number in (1, 2, 2, 2, 2, 2, 2, 2, 2, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1, launched=[one])
    for _ in range(400):  # run.stall_seconds may be long
        heard.hear({}, seconds=1, launched=[one])
    assert heard.present()["w0"].seconds > 400


@pytest.mark.parametrize(
    ("name", "role", "pid"),
    [("evil", WORKER, 7), ("evil", WORKER, 8), ("learner.evil", "actor", 8), ("evil", "learner", 9), ("w0", WORKER, 8)],
)
def test_who_says_that_it_is_a_process_of_ours_is_not_heard(name: str, role: str, pid: int) -> None:
    """Else that one would be killed for what this one says of itself."""
    heard = tracker()
    own = [
        Launched(name="w0", role=WORKER, pid=7, seconds=9),
        Launched(name="learner", role="learner", pid=8, seconds=9),
    ]
    true = {"learner": beat("learner", 1, pid=8, role="learner"), "prompts": beat("prompts", 1, pid=8, role="actor")}
    heard.hear({"w0": beat("w0", 1), **true, name: beat(name, 2, pid=pid, role=role)}, seconds=1, launched=own)
    assert {(one.beat.actor, one.beat.pid) for one in heard.present().values()} == {
        ("w0", 7),
        ("learner", 8),
        ("prompts", 8),
    }


def test_other_watchers_are_no_part_of_the_run() -> None:
    heard = tracker()
    heard.hear({"watcher-9": beat("watcher-9", 1, role=WATCHER)}, seconds=1)
    assert heard.present() == {}


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
    """All waited a minute for one who worked, and then it died."""
    since = Since()
    window = replace(finding("window"), seconds=60.0, is_joint=True)
    engine = replace(finding("engine"), seconds=60.0)
    said = []
    for listened, found in ((100, [window]), (101, [window, engine]), (103, [window]), (104, []), (105, [window])):
        said.append([one.seconds for one in since.counted(found, listened)])
    assert said == [[0], [1, 60], [3], [], [0]]


def test_the_state_of_a_process_is_what_its_machine_says() -> None:
    assert process_state(os.getpid()) == "running"
    assert process_state(0) == ""
    assert process_state(2**22 + 1) == "gone"


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
    """A bus that can be deaf, or refuse to store."""

    def __init__(self) -> None:
        self.bus = memory_bus()
        self.deaf = self.full = False
        self.lost: list[Loss] = []

    async def states(self, topic: Any) -> Any:
        if self.deaf:
            raise BusError("no answer")
        return await self.bus.states(topic)

    async def losses(self) -> list[Loss]:
        return self.lost

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
    for _ in range(4):  # its actors need some seconds to find it again
        clock.now += 1
        assert diagnose(await watcher.look()) == []
    await watcher.close()


async def test_a_bus_that_does_not_answer_once_is_asked_again_at_once_and_then_named(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of pause, 3 s without an answer, and 2 s more: named after 6.2 s."""
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
    assert given[2:] == [ANSWER_SECONDS]  # it has the usual time to be back
    await watcher.close()


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


async def test_a_part_of_the_bus_that_is_gone_is_named_and_nobody_is_accused(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    for number in (1, 2):
        clock.now += 1
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        assert diagnose(await watcher.look()) == []
    bus.lost = [Loss(name="KV_actors", topics=("actors",), problem="was deleted", is_gone=True)]
    bus.deaf = True  # whoever reads it would wait
    for _ in range(8):
        clock.now += 1
        (found,) = diagnose(await watcher.look())
    assert (found.fault, found.actor, found.seconds) == ("lost", "KV_actors", 7)
    bus.deaf, bus.lost = False, [Loss(name="KV_actors", topics=("actors",), problem="was made anew", is_mended=True)]
    await bus.forget(ACTORS, key="learner")
    clock.now += 1
    (found,) = diagnose(await watcher.look())
    assert "the learner has made it again" in found.remedy
    bus.lost = []
    await bus.put(ACTORS, beat("learner", 3, role=LEARNER, host="there"), key="learner")
    clock.now += recent_losses.LOSS_SECONDS
    assert [one.fault for one in diagnose(await watcher.look())] == ["lost"]
    clock.now += 1
    assert diagnose(await watcher.look()) == []
    await watcher.close()


async def test_heartbeats_that_somebody_removes_are_named_once_and_nobody_is_accused(clock: Clock) -> None:
    """Each actor has sent another one before long: what is missed is the watcher's own."""
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))

    async def look(number: int) -> list[str]:
        clock.now += 1
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        return [one.text for one in diagnose(await watcher.look())]

    assert [await look(number) for number in (1, 2, 3)] == [[], [], []]
    for key in await bus.states(ACTORS):
        await bus.forget(ACTORS, key=key)
    assert await look(4) == ["nats-server: heartbeats were removed"]
    for number in range(5, 5 + int(recent_losses.LOSS_SECONDS)):
        await look(number)
    assert await look(20) == []
    await watcher.close()


async def test_a_watcher_whose_own_beat_expired_while_it_was_frozen_misses_nothing(clock: Clock) -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    for number in (1, 2):
        await bus.put(ACTORS, beat("learner", number, role=LEARNER, host="there"), key="learner")
        await watcher.look()
    (own,) = (await bus.states(ACTORS)).keys() - {"learner"}
    await bus.forget(ACTORS, key=own)
    clock.now += 20
    await bus.put(ACTORS, beat("learner", 3, role=LEARNER, host="there"), key="learner")
    assert diagnose(await watcher.look()) == []
    await watcher.close()


async def test_a_watcher_leaves_nothing_behind_and_sees_that_the_run_is_finished() -> None:
    bus = Flaky()
    watcher = HealthMonitor(lambda: _ready(bus))
    await bus.put(PROGRESS, buses.progress(3))
    assert not (await watcher.look()).is_finished
    assert len(await bus.states(ACTORS)) == 1
    await watcher.close()
    assert await bus.states(ACTORS) == {}


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


async def test_doctor_does_not_take_a_run_that_ended_for_a_bus_that_died(tmp_path: Path) -> None:
    """`asyncrl run` removes its address when it ends; somebody may be listening just then."""
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "over"\ndirectory = "{tmp_path}"\n[model]\npath = ""\n[data]\npath = ""\n'
    )
    with pytest.raises(NoSuchRun, match="no `asyncrl run` is up"):
        await doctor._listen(config.load(tmp_path / "run.toml"), token="")


class Slow:
    """A watcher whose looks take longer than they count: a busy machine's."""

    def __init__(self, *, fails_at: Container[int]) -> None:
        self._fails_at = fails_at
        self._listened = 0.0
        self.num_looks = 0
        self.error: Exception | None = None

    async def look(self) -> Observation:
        await asyncio.sleep(0)
        self.error = BusError("no answer") if self.num_looks in self._fails_at else None
        self._listened += 0.25 if self.num_looks and self.error is None else 0.0
        self.num_looks += 1
        return Observation(actors={}, listened=self._listened)

    async def close(self) -> None: ...


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slow]:
    def made(*, fails_at: Container[int]) -> Slow:
        watcher = Slow(fails_at=fails_at)
        monkeypatch.setattr(doctor, "HealthMonitor", lambda connect: watcher)
        return watcher

    monkeypatch.setattr(doctor, "LISTEN_SECONDS", 2.5)
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.0)
    return made


RUN = config.only_overrides(["bus.url=nats://nowhere:1"])


@pytest.mark.parametrize(("fails_at", "looks"), [(set(), 11), ({0}, 11), ({5}, 16)])
async def test_doctor_listens_as_long_on_a_busy_machine_and_again_when_the_bus_was_away(
    slow: Callable[..., Slow], fails_at: Container[int], looks: int
) -> None:
    watcher = slow(fails_at=fails_at)
    await doctor._listen(RUN, token="")
    assert watcher.num_looks == looks


async def test_doctor_that_can_hardly_hear_calls_nobody_well(
    slow: Callable[..., Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MOST_SECONDS", 0.1)
    slow(fails_at=range(0, 10**12, 3))
    with pytest.raises(NoAnswer, match="answered too seldom to hear who is well"):
        await doctor._listen(RUN, token="")
