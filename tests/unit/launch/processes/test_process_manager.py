"""Which process of a run is restarted, under which name, and which end of a process ends the run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

import pytest

from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.errors import INTERRUPTED, LaunchError, NameTaken, NoRoom
from asyncrl.launch.port import ProcessSpec
from asyncrl.launch.processes import child_process, process_manager, server_restarts
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.messages.roles import LEARNER
from asyncrl.policies.health.faults import Finding
from tests.harness.fleet import Launcher, Process, Stage


async def test_a_worker_whose_gpu_is_gone_waits_for_another_and_the_run_goes_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_manager, "LONGEST_BACK_OFF_SECONDS", 0.05)
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
    monkeypatch.setattr(process_manager, "LONGEST_BACK_OFF_SECONDS", 0.05)
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
    """A process that never reached its bus ends with exit code 2, but its configuration is not wrong."""
    monkeypatch.setattr(process_manager, "BUS_PAUSE_SECONDS", 0.01)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.manager._on_findings([Finding(fault="bus storage", actor="nats-server", cause="full", remedy="make room")])
    for code in (1, 1, 2, 2, 1, 1):
        before = len(it.launcher.started)
        it.launcher.named("w0").code.set_result(code)
        await it.until(lambda before=before: len(it.launcher.started) > before)
    await it.until_up("w0", "w1")
    monkeypatch.setattr(process_manager, "BUS_SECONDS", 0.0)  # the bus is back
    it.launcher.named("w0").code.set_result(2)
    assert (await it.task).exit_code == 2


async def test_whoever_ends_for_a_disk_that_takes_nothing_is_started_again_however_often(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_manager, "DISK_PAUSE_SECONDS", 0.01)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    for _ in range(8):
        before = len(it.launcher.started)
        it.launcher.named("learner").code.set_result(5)
        await it.until(lambda before=before: len(it.launcher.started) > before)
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_the_servers_disk_is_asked_beside_the_event_loop(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable network disk does not answer for minutes. The server is ended only when there is room."""
    asked, answer, room = threading.Event(), threading.Event(), [False]

    class Server:
        pid = 4242

        def has_room(self) -> bool:
            asked.set()
            return answer.wait(30) and room[0]

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(server_restarts.os, "kill", lambda *which: killed.append(which))
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    monkeypatch.setattr(it.manager, "_server", Server())
    monkeypatch.setattr(it.manager._faults, "seconds", lambda finding: 1e10)
    full = Finding(fault="bus storage", actor="nats-server", cause="full", remedy="make room", cure="restart")
    it.manager._on_findings([full])
    await it.until(asked.is_set)
    it.manager._on_findings([full])  # the loop continues, and there is only one question at a time
    assert killed == []
    answer.set()
    await it.until(lambda: it.manager._killing_server.done())
    assert killed == []
    room[0] = True
    it.manager._on_findings([full])
    await it.until(lambda: killed)
    assert killed == [(4242, signal.SIGKILL)]
    monkeypatch.setattr(it.manager, "_server", None)
    assert await it.end() == 0


async def test_a_start_that_fails_is_tried_again(stage: Callable[..., Stage]) -> None:
    launcher = Launcher()
    launcher.fails = 2
    it = stage(launcher)
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_too_little_room_from_the_start_ends_the_run(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher(room=1))
    assert (await it.task).exit_code == 2


def test_a_child_that_is_signalled_before_it_is_there_gets_it_once_when_it_is() -> None:
    async def main() -> None:
        launcher = Launcher()
        child = ChildProcess(
            spec=ProcessSpec(name=LEARNER, role=LEARNER, arguments=()), restarts=child_process.RestartPolicy(0)
        )
        child.signal(15)
        assert (await child.run_once(launcher)).code == 0
        again = asyncio.ensure_future(child.run_once(launcher))
        while len(launcher.started) < 2 or child.process is None:
            await asyncio.sleep(0)
        child.signal(9)
        assert (await again).code == -9
        assert [one.signals for one in launcher.started] == [[15], [9]]

    asyncio.run(main())


async def test_a_configuration_that_has_worked_is_not_called_wrong_when_the_bus_is_out_of_reach(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_worked = [True, False]
    monkeypatch.setattr(HealthMonitor, "has_worked", lambda *_: has_worked.pop(0))
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    for life in range(2):  # the second finds no bus, and has not worked
        it.launcher.named("w0").code.set_result(1 if life == 0 else 2)
        await it.until(lambda: "w0" not in it.names)
        await it.until_up("w0", "w1")
    assert not has_worked  # both lives were checked


async def test_a_configuration_that_never_worked_ends_the_run(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w0").code.set_result(2)
    assert (await it.task).exit_code == 2


async def test_a_worker_whose_name_another_one_has_takes_the_next_that_is_free(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines already use the names w0 and w2: neither a start nor `asyncrl scale` fails."""
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
    assert it.manager.fleet.status().workers == ("w2", "w1", "w4")
    assert not it.manager.fleet.status().problem
    assert await it.end() == 0


@pytest.mark.parametrize("has_trained", [True, False])
async def test_a_failed_run_gives_its_learner_the_time_for_a_checkpoint_if_it_has_trained(
    stage: Callable[..., Stage],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_trained: bool,
) -> None:
    monkeypatch.setattr(process_manager, "FINISH_SECONDS", 0.02)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    learner = it.launcher.named("learner")
    learner.drains = False
    monkeypatch.setattr(it.manager, "_has_worked", lambda node, pid: has_trained)
    it.launcher.named("w0").code.set_result(3)
    if has_trained:
        said = ""
        while "the learner ends its step" not in (said := said + capsys.readouterr().err):
            await asyncio.sleep(0.01)
        assert learner.signals == [15]
        learner.code.set_result(INTERRUPTED)
    assert (await it.task).exit_code == 3


async def test_a_learner_that_is_drained_because_the_run_failed_was_not_drained_by_somebody_else(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's exit code remains the run's exit code: a missing SGLang is not an interrupt."""
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("learner").drained_code = INTERRUPTED
    it.launcher.named("w0").code.set_result(2)
    assert (await it.task).exit_code == 2
    said = capsys.readouterr().err
    assert "w0 ended with exit code 2; ending the run" in said
    assert "from outside" not in said


async def test_an_interrupted_run_says_who_still_drains_and_for_how_long(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_manager, "DRAIN_REPORT_SECONDS", 0.02)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w1").drains = False
    it.launcher.named("learner").drained_code = INTERRUPTED
    it.manager.interrupt()
    said = ""
    while "still draining: w1; killed in " not in (said := said + capsys.readouterr().err):
        await asyncio.sleep(0.01)
    it.manager.interrupt()
    assert (await it.task).exit_code == INTERRUPTED


async def test_a_run_that_is_interrupted_before_its_learner_has_started_is_not_done(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher waits for GPUs, or its machine is busy: nothing was trained, and the exit code shows that."""
    launcher = Launcher()
    monkeypatch.setattr(launcher, "start", lambda spec: asyncio.Event().wait())
    it = stage(launcher)
    await asyncio.sleep(0)
    it.manager.interrupt()
    outcome = await it.task
    assert (outcome.exit_code, outcome.reason) == (INTERRUPTED, "interrupted")


async def test_a_run_that_is_done_stays_done_however_often_it_is_interrupted(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    """The user reads "done" and presses Ctrl-C while the workers are still ending."""
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w0").drains = it.launcher.named("w1").drains = False
    it.launcher.named("learner").code.set_result(0)
    await it.until(lambda: it.manager._over.is_set())
    it.manager.interrupt()
    assert "draining" not in capsys.readouterr().err
    it.manager.interrupt()
    assert (await it.task).exit_code == 0


async def test_a_rank_that_hangs_is_killed_when_its_learner_has_ended_and_both_come_back(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank joins two learners. The end of the last learner spares a rank that waits for its next start."""
    monkeypatch.setattr(process_manager, "RANK_PAUSE_SECONDS", 0.0)
    launcher = Launcher()
    it = stage(launcher, "learner.backend=megatron", "learner.ranks=2", "learner.machines=2")
    await it.until_up("learner-1", "w0", "w1")
    await it.until(lambda: all(child.process for child in it.manager.fleet.children))  # the manager knows what is up
    learner, rank = launcher.named("learner"), launcher.named("learner-1")
    learner.code.set_result(1)
    await it.until(lambda: launcher.named("learner") is not learner and launcher.named("learner-1") is not rank)
    await it.until_up("learner-1", "w0", "w1")
    assert rank.signals == [signal.SIGKILL]
    assert launcher.named("learner-1").signals == []
    assert await it.end() == 0
