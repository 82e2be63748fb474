"""Who is started, drained and refused when a fleet is told to have another size; its processes are scripts here."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from asyncrl import children, config, fleet
from asyncrl.actors.sizer import Sizer
from asyncrl.actors.watcher import Watcher
from asyncrl.bus.memory import MemoryBus
from asyncrl.children import Child
from asyncrl.commands import launch, scale
from asyncrl.errors import INTERRUPTED, LaunchError, NameTaken, NoRoom
from asyncrl.fleet_messages import FleetSize, FleetStatus
from asyncrl.launchers.port import ProcessSpec
from asyncrl.messages import Heartbeat
from asyncrl.placement import free
from asyncrl.policies.faults import LEARNER, WORKER, Finding
from asyncrl.topics import ACTORS, FLEET, FLEET_STATUS
from tests.bus_fixtures import heartbeat
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


class Process:
    """Ends when it is told to."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.pid, self.node = spec, 0, "here"
        self.signals: list[int] = []
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.drains = True
        self.drained_code = 0

    async def ended(self) -> int:
        return await asyncio.shield(self.code)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.code.done() and (number == 9 or self.drains):
            self.code.set_result(-9 if number == 9 else self.drained_code)


class Launcher:
    """``room``: so many GPUs, which it deals itself; None leaves that to asyncrl."""

    def __init__(self, room: int | None = None) -> None:
        self.room, self.places = room, room is not None
        self.started: list[Process] = []
        self.fails = 0

    async def start(self, spec: ProcessSpec) -> Process:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise LaunchError("the cluster is away")
        taken = sum(one.spec.num_gpus for one in self.up)
        if self.room is not None and taken + spec.num_gpus > self.room:
            raise NoRoom(f"{spec.num_gpus} GPU asked for, {self.room - taken} free")
        self.started.append(Process(spec))
        return self.started[-1]

    async def release(self, name: str) -> None: ...

    async def close(self) -> None:
        for process in self.started:
            process.signal(9)

    @property
    def up(self) -> list[Process]:
        return [one for one in self.started if not one.code.done()]

    def named(self, name: str) -> Process:
        return [one for one in self.started if one.spec.name == name][-1]


class Stage:
    """A fleet of two workers that runs, and its bus."""

    def __init__(self, launcher: Launcher, *, gpus: int) -> None:
        self.launcher = launcher
        self.bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        settings = config.load(DEMO, ["learner.device=cpu"])
        self.staff = launch.Staff(settings, launcher=launcher, common=["RUN.toml"], environment={})
        self.fleet = fleet.Fleet(
            dataclasses.replace(settings.run, stall_seconds=1e9),
            launcher=launcher,
            children=self.staff.first(workers=None, resume=False),
            hire=self.staff.hire,
            server=None,
        )
        self.task = asyncio.create_task(self.fleet.run(Watcher(self._bus), Sizer(self._bus, self.fleet)))

    async def _bus(self) -> MemoryBus:
        return self.bus

    @property
    def names(self) -> list[str]:
        return [one.spec.name for one in self.launcher.up]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert not self.task.done(), self.task.result()
            await asyncio.sleep(0.01)

    async def until_up(self, *names: str) -> None:
        await self.until(lambda: set(self.names) == {"learner", *names})

    async def ask(self, count: int) -> FleetStatus:
        """What the fleet says to this size, once it has said it."""
        await self.bus.put(FLEET, FleetSize(rollout_workers=count, request=f"to {count}"))
        while (status := (await self.bus.states(FLEET_STATUS)).get("")) is None or status.request != f"to {count}":
            await asyncio.sleep(0.01)
        return status

    async def end(self) -> int:
        self.launcher.named("learner").signal(15)
        return await self.task


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def one(launcher: Launcher, *, gpus: int = 0) -> Stage:
        monkeypatch.setattr(launch, "num_gpus", lambda: gpus)
        monkeypatch.setattr("asyncrl.commands.check.num_gpus", lambda: gpus)
        made.append(Stage(launcher, gpus=gpus))
        return made[-1]

    monkeypatch.setattr(children, "BACK_OFF_SECONDS", 0.0)
    monkeypatch.setattr(fleet, "FINISH_SECONDS", 0.1)
    yield one
    for each in made:
        if not each.task.done():
            each.fleet._over.set()
            await each.task


async def test_new_workers_take_the_lowest_free_names_and_the_newest_leave_first(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.ask(4)
    await it.until_up("w0", "w1", "w2", "w3")
    it.launcher.named("w3").drains = False
    status = await it.ask(2)
    await it.until_up("w0", "w1", "w3")
    assert (status.workers, "w3" in status.draining) == (("w0", "w1"), True)
    await it.ask(4)  # w3 still has its name
    await it.until_up("w0", "w1", "w2", "w3", "w4")
    await it.ask(0)
    await it.until(lambda: set(it.names) == {"learner", "w3"})
    assert it.launcher.named("w3").signals == [15]
    assert await it.end() == 0


async def test_a_quarantined_worker_leaves_before_a_newer_one_that_works(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.bus.put(ACTORS, in_quarantine("w0"), key="w0")
    await it.until(lambda: it.fleet.status().workers == ("w1", "w0"))
    await it.ask(1)
    await it.until_up("w1")
    assert await it.end() == 0


async def test_the_command_waits_for_a_quarantined_worker_to_be_mended(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.bus.put(ACTORS, in_quarantine("w0"), key="w0")
    await it.bus.put(ACTORS, heartbeat("w1"), key="w1")
    assert await scale._ask(it.bus, "demo", 2, seconds=1.0) == 1
    assert "still waiting for w0 to be mended (quarantined; `asyncrl doctor` says why)" in capsys.readouterr().out


def in_quarantine(name: str) -> Heartbeat:
    return Heartbeat(actor=name, role=WORKER, phase="quarantined", problem="it lies", host="here", pid=0)


async def test_who_was_asked_to_leave_did_not_die(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w1").drains = False
    await it.ask(1)
    it.launcher.named("w1").code.set_result(1)
    await it.until(lambda: not it.fleet.status().draining)
    said = capsys.readouterr().err
    assert "w1 ended with exit code 1 while it left; others have its work" in said
    assert "restart" not in said
    assert await it.end() == 0


async def test_who_is_slow_to_leave_is_asked_to_hand_over_and_then_killed(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(fleet, "HAND_OVER_SECONDS", 0.05)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w1").drains = False
    await it.ask(1)
    await it.until_up("w0")
    assert it.launcher.named("w1").signals == [15, 15, 9]


async def test_gpus_that_are_free_go_to_new_workers_and_when_there_are_none_they_are_refused(
    stage: Callable[..., Stage],
) -> None:
    it = stage(Launcher(), gpus=4)
    await it.until_up("w0", "w1")
    status = await it.ask(9)
    assert status.problem == (
        "another worker needs 1 GPU, and of 0, 1, 2, 3 none is free; the fleet stays at 4 rollout workers"
    )
    await it.until_up("w0", "w1", "w2", "w3")
    assert {it.launcher.named(f"w{number}").spec.gpus for number in range(4)} == {(0,), (1,), (2,), (3,)}
    while (await it.bus.states(FLEET))[""].rollout_workers != 4:  # what it comes back with
        await asyncio.sleep(0.01)
    await it.ask(1)
    await it.until_up("w0")
    assert (await it.ask(2)).problem == ""
    await it.until_up("w0", "w1")


async def test_a_launcher_that_has_no_room_is_heard_too(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher(room=3))
    await it.until_up("w0", "w1")
    await it.ask(5)
    await it.until_up("w0", "w1", "w2")
    while not (status := (await it.bus.states(FLEET_STATUS))[""]).problem or status.rollout_workers != 3:
        await asyncio.sleep(0.01)
    assert status.problem == ("w4 does not start: 1 GPU asked for, 0 free; the fleet stays at 3 rollout workers")


async def test_a_worker_whose_gpu_is_gone_waits_for_another_and_the_run_goes_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "LONGEST_BACK_OFF_SECONDS", 0.05)
    it = stage(Launcher(room=2))
    await it.until_up("w0", "w1")
    it.launcher.room = 1
    it.launcher.named("w1").code.set_result(-9)
    await it.until_up("w0")
    said = ""
    while "next try in" not in (said := said + capsys.readouterr().err):
        await asyncio.sleep(0.01)
    it.launcher.room = 2
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_a_learner_whose_machine_is_gone_waits_for_another_and_is_resumed(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "LONGEST_BACK_OFF_SECONDS", 0.05)
    launcher = Launcher(room=2)
    it = stage(launcher)
    await it.until_up("w0", "w1")
    assert "--resume" not in launcher.named("learner").spec.arguments
    refuse = [NoRoom("no machine"), LaunchError("the cluster is away")]
    real = launcher.start

    async def start(spec: ProcessSpec) -> Process:
        if refuse:
            raise refuse.pop(0)
        return await real(spec)

    monkeypatch.setattr(launcher, "start", start)
    launcher.named("learner").code.set_result(-9)
    await it.until(lambda: not refuse)
    await it.until_up("w0", "w1")
    assert launcher.named("learner").spec.arguments[-1] == "--resume"
    assert await it.end() == 0


async def test_whoever_dies_of_a_bus_that_is_away_is_started_again_however_often(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 is what a process says that never reached its bus: no mistake of the configuration."""
    monkeypatch.setattr(fleet, "BUS_PAUSE_SECONDS", 0.01)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.fleet._on_findings([Finding(fault="bus storage", actor="nats-server", cause="full", remedy="make room")])
    for code in (1, 1, 2, 2, 1, 1):
        before = len(it.launcher.started)
        it.launcher.named("w0").code.set_result(code)
        await it.until(lambda before=before: len(it.launcher.started) > before)
    await it.until_up("w0", "w1")
    monkeypatch.setattr(fleet, "BUS_SECONDS", 0.0)  # it is back
    it.launcher.named("w0").code.set_result(2)
    assert await it.task == 2


async def test_a_start_that_fails_is_tried_again(stage: Callable[..., Stage]) -> None:
    launcher = Launcher()
    launcher.fails = 2
    it = stage(launcher)
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_too_little_room_from_the_start_ends_the_run(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher(room=1))
    assert await it.task == 2


async def test_a_new_worker_whose_configuration_is_wrong_is_refused_and_the_run_goes_on(
    stage: Callable[..., Stage],
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.ask(3)
    await it.until_up("w0", "w1", "w2")
    it.launcher.named("w2").code.set_result(2)
    while not (status := (await it.bus.states(FLEET_STATUS))[""]).problem:
        await asyncio.sleep(0.01)
    assert status.problem == "w2 ended with exit code 2; the fleet stays at 2 rollout workers"
    assert await it.end() == 0


# -- asyncrl scale -----------------------------------------------------------------------------------------------------


async def test_the_command_waits_until_workers_sample(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    asked = asyncio.create_task(scale._ask(it.bus, "demo", 3, seconds=60))
    await it.until_up("w0", "w1", "w2")
    for name in ("w0", "w1", "w2"):
        await it.bus.put(ACTORS, heartbeat(name), key=name)
    assert await asked == 0
    assert "run demo: 3 rollout workers after" in capsys.readouterr().out


async def test_the_command_says_what_is_missing_after_its_time(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    assert await scale._ask(it.bus, "demo", 2, seconds=1.0) == 1
    assert "not yet 2 rollout workers after 1 s; still waiting for w0, w1 to start" in capsys.readouterr().out


async def test_a_refusal_is_one_line(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher(), gpus=3)
    await it.until_up("w0", "w1")
    with pytest.raises(NoRoom, match="another worker needs 1 GPU, and of 0, 1, 2 none is free; the fleet stays at 3"):
        await scale._ask(it.bus, "demo", 4, seconds=60)


# -- free GPUs ---------------------------------------------------------------------------------------------------------


def test_free_gpus_are_those_that_nobody_has_and_the_run_file_allows() -> None:
    assert free(8, taken={0, 1, 4}, needed=2) == (2, 3)
    assert free(8, taken={0, 1, 4}, needed=2, given=(4, 6, 7)) == (6, 7)
    assert free(0, taken=set(), needed=2) == free(8, taken=set(), needed=0) == ()
    with pytest.raises(NoRoom, match="another worker needs 2 GPUs, and of 0, 1, 2 only 2 is free"):
        free(3, taken={0, 1}, needed=2)


def test_a_child_that_is_signalled_before_it_is_there_gets_it_when_it_is() -> None:
    async def main() -> None:
        launcher = Launcher()
        child = Child(spec=ProcessSpec(name=LEARNER, role=LEARNER, arguments=()), budget=children.Budget(0))
        child.signal(15)
        assert (await child.live(launcher)).code == 0
        assert launcher.started[0].signals == [15]

    asyncio.run(main())


async def test_a_configuration_that_has_worked_is_not_called_wrong_when_the_bus_is_out_of_reach(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_worked = [True, False]
    monkeypatch.setattr(Watcher, "has_worked", lambda *_: has_worked.pop(0))
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    for life in range(2):  # the second finds no bus, and has not worked
        it.launcher.named("w0").code.set_result(1 if life == 0 else 2)
        await it.until(lambda: "w0" not in it.names)
        await it.until_up("w0", "w1")
    assert not has_worked  # it was asked of both lives


async def test_a_configuration_that_never_worked_ends_the_run(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w0").code.set_result(2)
    assert await it.task == 2


async def test_a_worker_whose_name_another_one_has_takes_the_next_that_is_free(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody on another machine called his w0, and another one w2: neither a start nor `asyncrl scale` fails."""
    released: list[str] = []

    async def release(_: Launcher, name: str) -> None:
        released.append(name)

    monkeypatch.setattr(Launcher, "release", release)
    it = stage(Launcher(), gpus=4)
    await it.until_up("w0", "w1")
    first = it.launcher.named("w0")
    first.code.set_result(NameTaken.exit_code)
    await it.until_up("w1", "w2")
    again = it.launcher.named("w2")
    assert again.spec.arguments == (*first.spec.arguments[:-1], "w2")
    assert again.spec.gpus == first.spec.gpus
    assert released == ["w0"]
    assert "'w0' is the name of a rollout worker that is not ours: ours is 'w2' now" in capsys.readouterr().err
    await it.ask(3)
    await it.until_up("w1", "w2", "w3")
    it.launcher.named("w3").code.set_result(NameTaken.exit_code)
    await it.until_up("w1", "w2", "w4")
    assert it.fleet.status().workers == ("w2", "w1", "w4")
    assert not it.fleet.status().problem
    assert await it.end() == 0


@pytest.mark.parametrize("has_trained", [True, False])
async def test_a_failed_run_gives_its_learner_the_time_for_a_checkpoint_if_it_has_trained(
    stage: Callable[..., Stage],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_trained: bool,
) -> None:
    monkeypatch.setattr(fleet, "FINISH_SECONDS", 0.02)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    learner = it.launcher.named("learner")
    learner.drains = False
    monkeypatch.setattr(it.fleet, "_has_worked", lambda node, pid: has_trained)
    it.launcher.named("w0").code.set_result(3)
    if has_trained:
        said = ""
        while "the learner ends its step" not in (said := said + capsys.readouterr().err):
            await asyncio.sleep(0.01)
        assert learner.signals == [15]
        learner.code.set_result(INTERRUPTED)
    assert await it.task == 3


async def test_a_learner_that_is_drained_because_the_run_failed_was_not_drained_by_somebody_else(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's exit code stays the run's: SGLang that is not installed is no interrupt."""
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("learner").drained_code = INTERRUPTED
    it.launcher.named("w0").code.set_result(2)
    assert await it.task == 2
    said = capsys.readouterr().err
    assert "w0 ended with exit code 2; ending the run" in said
    assert "somebody else" not in said
