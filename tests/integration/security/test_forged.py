"""A client with all server rights forges messages of the learner: no process accepts them, and the run continues."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.adapters import registry
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.streams import last_stored
from asyncrl.errors import BusFull
from asyncrl.messages import (
    Event,
    Heartbeat,
    Progress,
    Quarantine,
    StepMetrics,
    Wait,
    WeightVersion,
    replace,
)
from asyncrl.messages.control import FleetStatus
from asyncrl.messages.signing import Signatures, SigningKey
from asyncrl.messages.topics import (
    ACTORS,
    EVENTS,
    FLEET_STATUS,
    METRICS,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    TRAJECTORIES,
    WEIGHTS,
    Topic,
)
from tests.conftest import BUS_SIZES
from tests.harness.buses import group, prompt
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FORGED: tuple[tuple[Topic[Any], str, Any], ...] = (
    (PROGRESS, "", Progress(incarnation=0, step=10**6, policy_version=10**6, finished=True)),
    (WEIGHTS, "", WeightVersion(incarnation=10**6, policy_version=1, uri="/evil", sha256="ab", num_bytes=1)),
    (QUARANTINE, "w0", Quarantine(worker="w0", reason="evil", incarnation=0)),
    (FLEET_STATUS, "", FleetStatus(rollout_workers=0, problem="evil")),
    (METRICS, "", StepMetrics(step=10**6)),
)


@pytest.fixture
async def run(tmp_path: Path, forks: ForkServer) -> AsyncIterator[RunProcess]:
    one = RunProcess(tmp_path / "here", forks=forks)
    one.start()
    async with one.heard():
        await one.until(lambda: one.steps >= 3, "three steps")
        yield one
    one.kill()


async def intruder(run: RunProcess, *, is_signing: bool) -> JetStreamBus:
    """Return a bus connection with the run's token, which permits everything."""
    url, token = registry.bus_address(run.config(), token="")
    own = SigningKey(b"e" * 32) if is_signing else None
    signatures = Signatures(run="fleet", own=own, life=2**60)
    return await JetStreamBus.connect(
        url, run="fleet", token=token, storage="file", signatures=signatures, **BUS_SIZES | {"max_prompts": 40}
    )


def logs(run: RunProcess) -> str:
    return "".join(path.read_text() for path in (run.run_directory / "logs").glob("*.log"))


async def test_what_is_forged_or_said_again_changes_nothing(run: RunProcess) -> None:
    evil, plain = await intruder(run, is_signing=True), await intruder(run, is_signing=False)
    try:
        old = {topic.name: await stored(evil, topic) for topic in (PROGRESS, WEIGHTS)}
        await run.until(lambda: run.steps >= 6, "more steps")
        for bus in (evil, plain):
            for topic, key, message in FORGED:
                await bus.put(topic, message, key=key)
            await publish_prompt(bus, 10**6)
            step = run.steps
            await run.until(lambda step=step: run.steps >= step + 3, "steps after what was forged")
        for topic in (PROGRESS, WEIGHTS):
            await evil._set(topic, "", old[topic.name], {})
            step = run.steps
            await run.until(lambda step=step: run.steps >= step + 3, f"steps after an old {topic.name}")
        for topic in (PROGRESS, WEIGHTS, PROMPTS):
            await run.until(lambda name=topic.name: f"{name}: rejected" in logs(run), f"a word about {topic.name}")
    finally:
        await evil.close()
        await plain.close()
    said = logs(run)
    assert "is not signed by the run's learner" in said or "the run's learner is" in said
    assert not {event.kind for event in run.events} & {"quarantined"}
    assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)


async def test_nobody_speaks_in_the_name_of_a_worker_or_of_the_learner(run: RunProcess, tmp_path: Path) -> None:
    """w0 is the run's own worker; the guest joined by itself."""
    evil, plain = await intruder(run, is_signing=True), await intruder(run, is_signing=False)
    joined = run.join("guest", folder=tmp_path)
    try:
        await run.until(lambda: run.event("first_trained", "guest"), "something of the guest")
        found = run.event("joined", "guest")
        assert found is not None
        guest = found.actor
        for bus in (evil, plain):
            step, taken = run.steps, 0
            while taken < 4:  # before the workers have made them
                number = max(map(int, await bus.keys(PROMPTS)), default=0) + 1
                for group_id in range(number, number + 40):
                    # if accepted, it would get the worker quarantined
                    forged = replace(group(group_id), worker=("w0", guest)[group_id % 2])
                    taken += taken < 4 and await bus.publish(TRAJECTORIES, forged, key=str(group_id))
            speaking = asyncio.create_task(speak_for_others(bus, ("w0", guest)))
            try:
                await run.until(lambda: "actors: rejected" in logs(run), "a word about heartbeats")
            finally:
                speaking.cancel()
            await run.until(lambda step=step: run.steps >= step + 6, "steps after what was forged")
        assert joined.poll() is None
    finally:
        joined.kill()
        joined.wait()
        await evil.close()
        await plain.close()
    said = logs(run)
    assert "trajectories: rejected" in said  # because of their sender, or because such a group was not requested yet
    assert "actors: rejected" in said and "by another process" in said
    assert "quarantine" not in run.said and "restart 1 of" not in run.said, run.said
    assert await asyncio.to_thread(run.drain) == 130
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0)


async def speak_for_others(bus: JetStreamBus, workers: tuple[str, ...]) -> None:
    """Publish damaging heartbeats and events in the names of the learner and of workers, until cancelled."""
    stuck = Wait(what="nothing", on="bus", seconds=1e6, limit=1.0)
    places: dict[str, tuple[str, int]] = {}
    for beat in itertools.count(1):
        places |= {name: (one.host, one.pid) for name, one in (await bus.states(ACTORS)).items() if one.pid > 1}
        for name, role in (("learner", "learner"), *((worker, "rollout-worker") for worker in workers)):
            forged = Heartbeat(actor=name, role=role, beat=beat, waits=(stuck,), problem="evil", pid=1)
            await bus.put(ACTORS, forged, key=name)
            host, pid = places.get(name, ("", 0))  # the process's own host and pid, under an unused name
            stalls = replace(stuck, on="step" if name == "learner" else "engine")
            await bus.put(ACTORS, replace(forged, actor="evil", host=host, pid=pid, waits=(stalls,)), key=name)
            event = Event(kind="quarantined", actor=name, time=0.0, data={"worker": workers[0]})
            await bus.publish(EVENTS, event, key=f"evil-{id(bus)}-{name}-{beat}")
        await asyncio.sleep(0.1)


async def publish_prompt(bus: JetStreamBus, number: int) -> None:
    """Publish a prompt as soon as there is room for one."""
    while True:
        with contextlib.suppress(BusFull):
            await bus.publish(PROMPTS, prompt(number), key=str(number))
            return
        await asyncio.sleep(0.01)


async def stored(bus: JetStreamBus, topic: Topic[Any]) -> bytes:
    """Return the stored bytes of a state, signature included."""
    stream, subject = await bus._stream(topic), bus._layout.subject(topic, "")
    found = await last_stored(bus._connection, stream=stream, subject=subject)
    assert found is not None
    return found.data
