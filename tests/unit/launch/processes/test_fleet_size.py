"""The size of the fleet: set by a command, or by the run itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncrl import config
from asyncrl.cli import scale
from asyncrl.errors import ConfigError, NoRoom
from asyncrl.launch.launchers.placement import free
from asyncrl.launch.processes import child_process, launch, process_specs
from asyncrl.messages import Heartbeat, StepMetrics
from asyncrl.messages.roles import WORKER
from asyncrl.messages.topics import ACTORS, EVENTS, FLEET, FLEET_STATUS, METRICS
from tests.harness.buses import first_event, heartbeat
from tests.harness.fleet import DEMO, Launcher, Stage


async def test_new_workers_take_the_lowest_free_names_and_the_newest_leave_first(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.ask(4)
    await it.until_up("w0", "w1", "w2", "w3")
    it.launcher.named("w3").drains = False
    status = await it.ask(2)
    await it.until_up("w0", "w1", "w3")
    assert (status.workers, "w3" in status.draining) == (("w0", "w1"), True)
    await it.ask(4)  # w3 still holds its name
    await it.until_up("w0", "w1", "w2", "w3", "w4")
    await it.ask(0)
    await it.until(lambda: set(it.names) == {"learner", "w3"})
    assert it.launcher.named("w3").signals == [15]
    assert await it.end() == 0


async def test_quarantined_worker_leaves_first(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await it.bus.put(ACTORS, in_quarantine("w0"), key="w0")
    await it.until(lambda: it.manager.fleet.status().workers == ("w1", "w0"))
    await it.ask(1)
    await it.until_up("w1")
    assert await it.end() == 0


def in_quarantine(name: str) -> Heartbeat:
    return Heartbeat(actor=name, role=WORKER, phase="quarantined", problem="it lies", host="here", pid=0)


async def test_leaving_worker_is_not_a_failure(stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w1").drains = False
    await it.ask(1)
    it.launcher.named("w1").code.set_result(1)
    await it.until(lambda: not it.manager.fleet.status().draining)
    said = capsys.readouterr().err
    assert "w1 ended with exit code 1 while it left; others have its work" in said
    assert "restart" not in said
    assert await it.end() == 0


async def test_slow_leaver_hands_over_and_is_then_killed(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(child_process, "HAND_OVER_SECONDS", 0.05)
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    it.launcher.named("w1").drains = False
    await it.ask(1)
    await it.until_up("w0")
    assert it.launcher.named("w1").signals == [15, 15, 9]


async def test_new_workers_get_free_gpus_or_are_refused(
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
    while (await it.bus.states(FLEET))[""].rollout_workers != 4:  # the size after a restart
        await asyncio.sleep(0.01)
    await it.ask(1)
    await it.until_up("w0")
    assert (await it.ask(2)).problem == ""
    await it.until_up("w0", "w1")


async def test_refuses_workers_if_the_launcher_has_no_room(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher(room=3))
    await it.until_up("w0", "w1")
    await it.ask(5)
    await it.until_up("w0", "w1", "w2")
    while not (status := (await it.bus.states(FLEET_STATUS))[""]).problem or status.rollout_workers != 3:
        await asyncio.sleep(0.01)
    assert status.problem == ("w4 does not start: 1 GPU asked for, 0 free; the fleet stays at 3 rollout workers")


async def test_command_waits_until_workers_sample(
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


def test_free_gpus_are_unused_and_allowed_by_the_run_file() -> None:
    assert free(8, taken={0, 1, 4}, needed=2) == (2, 3)
    assert free(8, taken={0, 1, 4}, needed=2, given=(4, 6, 7)) == (6, 7)
    assert free(0, taken=set(), needed=2) == free(8, taken=set(), needed=0) == ()
    with pytest.raises(NoRoom, match="another worker needs 2 GPUs, and of 0, 1, 2 only 2 is free"):
        free(3, taken={0, 1}, needed=2)


WAITING = {"learner/wait_seconds": 6.0, "learner/step_seconds": 4.0, "rollout/idle_ratio": 0.0}
BUSY = {"learner/wait_seconds": 0.0, "learner/step_seconds": 10.0, "rollout/idle_ratio": 0.6}


async def steps(it: Stage, numbers: dict[str, float], *, first: int, count: int = 40) -> None:
    """Publish the learner's metrics of these steps, with the number of workers that are up."""
    for step in range(first, first + count):
        workers = float(sum(name.startswith("w") for name in it.names))
        await it.bus.put(METRICS, StepMetrics(step=step, numbers={**numbers, "rollout/workers": workers}))
        await asyncio.sleep(0.005)


async def test_fleet_grows_while_the_learner_waits_and_shrinks_while_engines_do(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    """The size survives the process, like a size that an operator requested."""
    it = stage(Launcher(), "rollout.most_workers=4")
    await it.until_up("w0", "w1")
    event = asyncio.create_task(first_event(it.bus, "resized"))
    await steps(it, WAITING, first=1, count=60)
    await it.until_up("w0", "w1", "w2", "w3")
    assert (await it.bus.states(FLEET))[""].rollout_workers == 4
    assert (await event).data == {
        "from": 2,
        "to": 4,
        "because": "in 10 steps the learner was idle for 60% of the time and engines for 0%, "
        "and 0% of the answers were too old",
    }
    await steps(it, BUSY, first=101)
    await it.until_up("w0", "w1")
    assert "rollout.most_workers: 2 -> 4 rollout workers: in 10 steps" in (said := capsys.readouterr().err)
    assert "2 -> 4 rollout workers: + w2, w3" in said
    assert "-> 2 rollout workers: - w2" in said  # by way of three: earlier steps count as well
    assert len(await it.bus.keys(EVENTS)) == said.count("rollout.most_workers: ") >= 2
    assert await it.end() == 0


async def test_fleet_without_room_stops_asking_for_more(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_specs, "gpus_per_worker", lambda run: 1)
    it = stage(Launcher(room=2), "rollout.most_workers=4")
    await it.until_up("w0", "w1")
    await steps(it, WAITING, first=1, count=200)
    assert capsys.readouterr().err.count("rollout.most_workers: ") == 1
    assert len(await it.bus.keys(EVENTS)) == 1
    assert (await it.bus.states(FLEET))[""].rollout_workers == 2
    assert await it.end() == 0


async def test_fleet_without_a_rule_keeps_its_size(stage: Callable[..., Stage]) -> None:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    await steps(it, WAITING, first=1, count=60)
    assert await it.bus.states(FLEET) == {}
    assert launch._fleet_rule(config.load(DEMO, ["learner.device=cpu", "rollout.most_workers=2"])) is None
    assert await it.end() == 0


def test_refuses_most_workers_below_workers() -> None:
    with pytest.raises(ConfigError, match=r"most_workers must be 0 \(as many as workers\) or in 2\.\.[0-9]+, got 1"):
        config.load(DEMO, ["learner.device=cpu", "rollout.most_workers=1"])
