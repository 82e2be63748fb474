"""A learner does not start next to processes of another message schema; a worker does not follow such a learner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import same_version, single_learner
from asyncrl.messages import Heartbeat, WeightVersion, replace
from asyncrl.messages.topics import ACTORS, WEIGHTS


def beat(number: int, **fields: Any) -> Heartbeat:
    return Heartbeat(actor="w3", role="rollout-worker", host="elsewhere", pid=7, beat=number, **fields)


async def keep_beating(bus: Bus, **fields: Any) -> None:
    for number in range(2, 1000):
        await bus.put(ACTORS, beat(number, **fields), key="w3")
        await asyncio.sleep(0.01)


async def test_a_learner_is_refused_while_a_worker_of_another_schema_is_up(bus_factory: Any) -> None:
    bus = await bus_factory()
    await bus.put(ACTORS, beat(1, schema=1), key="w3")
    beating = asyncio.create_task(keep_beating(bus, schema=1))
    with pytest.raises(ConfigError) as refused:
        await same_version.refuse_others(bus, run="a")
    beating.cancel()
    assert str(refused.value) == (
        "run.name: rollout-worker 'w3' of run 'a' (process 7 on elsewhere) is up with another version of asyncrl "
        "(message schema 1, ours is 2); end it first"
    )


async def test_who_only_says_so_keeps_no_learner_out(bus_factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A joined worker may report any schema; if that counted, it would end the run at the learner's next restart."""
    bus = await bus_factory()
    await bus.put(ACTORS, beat(1, schema=1), key="w3")
    beating = asyncio.create_task(keep_beating(bus, schema=1))
    await same_version.refuse_others(bus, run="a", is_trusted=lambda name: name != "w3")
    beating.cancel()
    assert "'w3' (process 7 on elsewhere) says that it has another version" in caplog.text


async def test_who_calls_itself_a_learner_under_another_name_keeps_none_out(bus_factory: Any) -> None:
    bus = await bus_factory()
    false = Heartbeat(actor="evil", role="learner", host="elsewhere", pid=7, beat=1)
    await bus.put(ACTORS, false, key="evil")

    async def beat_on() -> None:
        for number in range(2, 1000):
            await bus.put(ACTORS, replace(false, beat=number), key="evil")
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat_on())
    await single_learner.on_bus(bus, run="a")
    assert not beating.done(), "it is let in beside one that says all the time that it is a learner"
    await bus.put(ACTORS, replace(false, actor="learner"), key="learner")
    beating.cancel()


async def test_a_worker_of_our_schema_is_no_matter(bus_factory: Any) -> None:
    bus = await bus_factory()
    await bus.put(ACTORS, beat(1), key="w3")
    beating = asyncio.create_task(keep_beating(bus))
    await same_version.refuse_others(bus, run="a")
    assert not beating.done(), "it is let in beside a worker that is up"
    beating.cancel()


async def test_the_last_heartbeat_of_a_killed_worker_is_no_matter(
    bus_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_version, "SECOND_BEAT_SECONDS", 0.2)
    bus = await bus_factory()
    await bus.put(ACTORS, beat(1, schema=1), key="w3")
    await same_version.refuse_others(bus, run="a")
    assert (await bus.states(ACTORS))["w3"].schema == 1, "it is let in although the beat is still there"


async def test_a_worker_waits_until_the_run_is_resumed_with_its_version(bus_factory: Any) -> None:
    bus = await bus_factory()
    await bus.put(WEIGHTS, WeightVersion(incarnation=0, policy_version=3, schema=1))
    waiting = asyncio.create_task(same_version.await_learner(bus, run="a"))
    await bus.put(WEIGHTS, WeightVersion(incarnation=0, policy_version=4, schema=1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    await bus.put(WEIGHTS, WeightVersion(incarnation=1, policy_version=4))
    await asyncio.wait_for(waiting, 10.0)


async def test_a_worker_does_not_wait_for_a_learner_that_has_announced_nothing(bus_factory: Any) -> None:
    bus = await bus_factory()
    async with asyncio.timeout(60):
        await same_version.await_learner(bus, run="a")
    assert await bus.states(WEIGHTS) == {}
