"""Which process of a run is restarted, under which name, and which end of a process ends the run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from asyncrl.errors import INTERRUPTED, BusError, LaunchError, NoRoom
from asyncrl.launch.port import ProcessSpec
from asyncrl.launch.processes import child_process, process_manager
from asyncrl.policies.health import faults
from asyncrl.policies.health.faults import Finding, Observation
from tests.harness.fleet import Launcher, Process, Stage


async def test_worker_whose_gpu_is_gone_waits_for_another(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "LONGEST_BACK_OFF_SECONDS", 0.05)
    it = stage(Launcher(room=2), "run.restarts=100")
    await it.until_up("w0", "w1")
    it.launcher.room = 1
    it.launcher.named("w1").code.set_result(-9)
    await it.until_up("w0")
    said = ""
    while "w1 does not start" not in (said := said + capsys.readouterr().err):
        await asyncio.sleep(0.01)
    it.launcher.room = 2
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_learner_whose_machine_is_gone_waits_for_another_and_is_resumed(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "LONGEST_BACK_OFF_SECONDS", 0.05)
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


async def test_restarts_are_free_while_the_bus_is_down(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = stage(Launcher(), "run.restarts=1")
    await it.until_up("w0", "w1")
    monkeypatch.setattr(child_process, "WORKING_SECONDS", 0.0)
    it.manager._on_findings([Finding(fault="bus storage", actor="nats-server", cause="full", remedy="make room")])
    for _ in range(6):
        before = len(it.launcher.started)
        it.launcher.named("w0").code.set_result(1)
        await it.until(lambda before=before: len(it.launcher.started) > before)
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_process_without_restarts_ends_the_run(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher(), "run.restarts=1")
    await it.until_up("w0", "w1")
    it.launcher.named("w0").code.set_result(-9)
    await it.until(lambda: "w0" not in it.names)
    await it.until_up("w0", "w1")
    it.launcher.named("w0").code.set_result(1)
    assert (await it.task).exit_code == 1
    said = capsys.readouterr().err
    assert "w0 ended with signal SIGKILL (out of memory? lower rollout.max_running" in said
    assert "restart 1 of 1" in said


async def test_hung_server_is_killed_and_a_full_one_is_not(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(process_manager.os, "kill", lambda *which: killed.append(which))
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    monkeypatch.setattr(it.manager, "_server", SimpleNamespace(pid=4242))
    monkeypatch.setattr(it.manager._faults, "seconds", lambda finding: 1e10)
    seen = Observation(actors={}, listened=1.0)
    it.manager._on_findings([faults.bus_refuses(seen)])
    assert killed == []
    it.manager._on_findings([faults.bus_silent(seen)])
    assert killed == [(4242, signal.SIGKILL)]
    monkeypatch.setattr(it.manager, "_server", None)
    assert await it.end() == 0


async def test_stuck_worker_is_killed_and_restarted_with_the_reason(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.until(lambda: all(child.process for child in it.manager.fleet.children))
    stuck = it.launcher.named("w1")
    monkeypatch.setattr(it.manager._faults, "seconds", lambda finding: 1e10)
    it.manager._on_findings([Finding(fault="engine", actor="w1", cause="its engine hangs", remedy="-", cure="restart")])
    await it.until(lambda: it.launcher.named("w1") is not stuck)
    assert stuck.signals == [signal.SIGKILL]
    assert "w1 ended with signal SIGKILL (its engine hangs)" in capsys.readouterr().err
    assert await it.end() == 0


async def test_failed_start_is_retried(stage: Callable[..., Stage]) -> None:
    launcher = Launcher()
    launcher.fails = 2
    it = stage(launcher)
    await it.until_up("w0", "w1")
    assert await it.end() == 0


async def test_exit_code_2_ends_the_run(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w0").code.set_result(2)
    assert (await it.task).exit_code == 2


@pytest.mark.parametrize("has_trained", [True, False])
async def test_failed_run_waits_for_the_checkpoint_of_a_learner_that_has_trained(
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
    monkeypatch.setattr(it.monitor, "has_worked", lambda node, pid: has_trained)
    it.launcher.named("w0").code.set_result(2)
    if has_trained:
        said = ""
        while "the learner ends its step" not in (said := said + capsys.readouterr().err):
            await asyncio.sleep(0.01)
        assert learner.signals == [15]
        learner.code.set_result(INTERRUPTED)
    assert (await it.task).exit_code == 2


async def test_run_whose_server_does_not_stay_up_ends_at_once(stage: Callable[..., Stage]) -> None:
    """No process can drain without its bus, so none is waited for."""

    def start() -> None:
        raise BusError("its store is damaged")

    it = stage(Launcher(), "run.restarts=1", server=SimpleNamespace(name="nats-server", pid=0, start=start))
    outcome = await it.task
    assert (outcome.exit_code, outcome.reason) == (
        1,
        "nats-server does not stay up (its store is damaged); ending the run",
    )


async def test_failure_of_a_worker_is_the_exit_code_of_the_run(
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


@pytest.mark.parametrize("code", [INTERRUPTED, -signal.SIGTERM])
async def test_a_worker_that_is_told_to_end_from_outside_comes_back_and_it_is_said(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str], code: int
) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    worker = it.launcher.named("w0")
    worker.code.set_result(code)
    await it.until(lambda: it.launcher.named("w0") is not worker)
    await it.until_up("w0", "w1")
    said = capsys.readouterr().err
    assert "told to end by a signal that is not of this run" in said and "restart 1 of 3" in said
    assert await it.end() == 0


async def test_ranks_end_and_restart_with_their_learner(
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


async def test_parts_of_an_engine_come_back_for_nothing_as_long_as_their_worker_does(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_manager, "RANK_PAUSE_SECONDS", 0.0)
    launcher = Launcher()
    options = ("engine.kind=sglang", "engine.device=cpu", "engine.options={tensor_parallel=2, machines=2}")
    one = stage(launcher, *options, "rollout.workers=1", "run.restarts=1")
    await one.until_up("w0", "w0-node1")
    for _ in range(3):  # more often than run.restarts
        before = launcher.named("w0-node1")
        before.signal(9)
        await one.until(lambda before=before: launcher.named("w0-node1") is not before)
    await one.until_up("w0", "w0-node1")
    assert not one.manager.own_processes()[1].name.startswith("w0-node")
    await one.ask(0)  # the worker drains and ends its engine, as which its other machine ends too
    await one.until(lambda: "w0" not in one.names)
    assert 15 not in launcher.named("w0-node1").signals
    launcher.named("w0-node1").code.set_result(0)
    await one.until(lambda: not one.manager.fleet.is_kept_running("w0-node1"))
    assert await one.end() == 0


async def test_a_rank_joins_a_learner_that_drains_while_it_waits_for_it(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes between the new start of the learner and that of its rank."""
    monkeypatch.setattr(process_manager, "RANK_PAUSE_SECONDS", 0.1)
    launcher = Launcher()
    it = stage(launcher, "learner.backend=megatron", "learner.ranks=2", "learner.machines=2")
    await it.until_up("learner-1", "w0", "w1")
    await it.until(lambda: all(child.process for child in it.manager.fleet.children))
    learner, rank = launcher.named("learner"), launcher.named("learner-1")
    learner.code.set_result(1)
    await it.until(lambda: launcher.named("learner") is not learner and it.manager.fleet.children[0].process)
    waits = launcher.named("learner")
    waits.drains = False
    it.manager.interrupt()
    await it.until(lambda: launcher.named("learner-1") is not rank)
    waits.code.set_result(INTERRUPTED)
    launcher.named("learner-1").code.set_result(0)
    assert (await it.task).exit_code == INTERRUPTED
