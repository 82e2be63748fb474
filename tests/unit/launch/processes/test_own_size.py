"""A run with rollout.most_workers requests sizes like `asyncrl scale`, and acts on them like on any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import launch, process_specs
from asyncrl.messages import StepMetrics
from asyncrl.messages.topics import EVENTS, FLEET, METRICS
from tests.harness.buses import first_event
from tests.harness.fleet import DEMO, Launcher, Stage

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
