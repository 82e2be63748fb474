"""Healthy runs: no fault that is derived from what a run trains, or from who trains it, is reported.

Faults derived from waits depend on the machine's load: tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.messages.roles import LEARNER
from asyncrl.policies.health import conditions, faults
from asyncrl.policies.health.faults import ActorStatus, Observation
from tests.harness.learning import demo_run, memory_bus

OF_THE_MACHINE = {"little room", "stale"}
BEAT_SECONDS = 0.05
CUT = (
    "rollout.max_new_tokens=2",
    "rollout.min_new_tokens=2",
    "rollout.group_size=32",  # the reward is 0.05 by chance: no step of 128 answers reaches the alarm's 0.1
    "learner.learning_rate=1e-6",
    "learner.min_learning_rate=1e-6",
    "metrics.mismatch_alarm=0",
)


async def named_in(run: RunConfig) -> set[str]:
    """Return the faults that a watcher names while the run is trained."""
    bus, found, about = memory_bus(), set[str](), settings_checksum(run)

    async def connect() -> Bus:
        return bus

    def look(seen: Observation) -> None:
        found.update(one.fault for one in (*conditions.findings(seen), *faults.other_settings(seen)))

    async def watch() -> None:
        while True:
            seen = await watcher.poll()
            look(seen)
            heard.update(name for name, one in seen.actors.items() if faults.SETTINGS in one.beat.numbers)
            await asyncio.sleep(BEAT_SECONDS)

    watcher, heard = HealthMonitor(connect), set[str]()
    learner, helpers = await build_learner(run, bus=bus, resume=False)
    worker, follower = await build_worker(run, bus=bus, name="w0")
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        beats = HeartbeatSender(worker, interval=BEAT_SECONDS, about=about)
        group.create_task(supervise(worker, follower, beats))
        await supervise(learner, *helpers, HeartbeatSender(learner, *helpers, interval=BEAT_SECONDS, about=about))
        watching.cancel()
    look(Observation(actors={LEARNER: ActorStatus(beat=learner.heartbeat())}, listened=0.0))  # its last heartbeat
    await watcher.close()
    assert {LEARNER, "w0"} <= heard
    return found - OF_THE_MACHINE


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), set[str]()),
        (("staleness.max_staleness=0",), set[str]()),
        (CUT, {"truncated"}),
        (("data.max_prompt_tokens=1", "data.epochs=100"), {"overlong"}),
    ],
    ids=["ordinary", "synchronous", "cut at two tokens", "most rows too long"],
)
async def test_a_run_that_is_well_is_accused_of_nothing(
    overrides: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    demo_task.write(tmp_path)
    assert await named_in(demo_run(tmp_path, "run.steps=14", *overrides)) == expected
