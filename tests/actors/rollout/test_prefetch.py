"""Prompt groups that a worker prefetches: how many, what happens to them, and that no one else pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout.delivery_attempts import DeliveryAttempts
from asyncrl.bus.port import Bus
from asyncrl.messages import Progress
from asyncrl.messages.topics import PROMPTS, SEGMENTS, TRAJECTORIES
from asyncrl.policies.prefetch import MOST, groups_ahead
from tests.harness import fakes
from tests.harness.buses import first, progress, publish_prompts, taken

NUM_SLOTS = 2  # one group of tests.harness.buses.prompt


@contextlib.asynccontextmanager
async def working(bus: Bus, engine: fakes.Engine, *, ahead: int, **changes: Any) -> AsyncIterator[Any]:
    """Yield (worker, task); the worker is killed at the end of the block."""
    actors = fakes.worker(bus, engine, groups_ahead=lambda: ahead, **({"max_running": NUM_SLOTS} | changes))
    task = asyncio.create_task(fakes.run_worker(actors))
    try:
        yield actors[0], task
    finally:
        task.cancel()
        await asyncio.wait((task,))


def gated() -> fakes.Engine:
    engine = fakes.Engine()
    engine.gate.clear()
    return engine


@pytest.mark.parametrize(
    ("rate", "round_trip", "groups"),
    [
        (12.0, 0.2, 8),  # 12 x 0.2 x 3 = 7.2 groups are begun in three round trips
        (1.2, 0.2, 1),
        (0.1, 0.2, 0),  # long answers
        (12.0, 0.002, 0),  # near
        (0.0, 10.0, 0),
        (1000.0, 1.0, MOST),
    ],
)
def test_as_many_are_ready_as_are_begun_in_three_round_trips(rate: float, round_trip: float, groups: int) -> None:
    assert groups_ahead(groups_per_second=rate, round_trip_seconds=round_trip) == groups


async def test_a_worker_holds_what_it_runs_and_what_it_keeps_ready_and_no_more(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    engine = gated()
    await publish_prompts(bus, 0)
    async with working(await bus_factory(), engine, ahead=2):
        await fakes.until(lambda: engine.running == 2)
        await publish_prompts(bus, 1, 2, 3, 4)
        async with taken(other, 2) as theirs:
            assert {delivery.attempt for delivery in theirs} == {1}
            engine.version = (0, 3)
            engine.gate.set()
            records = await first(bus, 3)
    versions = {
        record.key: {span.policy_version for one in record.message.trajectories for span in one.version_spans}
        for record in records
    }
    assert versions.pop("0") == {0, 3}
    assert list(versions.values()) == [{3}, {3}]  # both began with the newest weights


async def test_who_drains_gives_back_at_once_what_it_has_not_begun(bus_factory: Any) -> None:
    """Groups that have arrived but were not looked at are returned as well. The bus itself would not
    redeliver them before the test ends."""
    bus, other = await bus_factory(ack_seconds=3600.0), await bus_factory(ack_seconds=3600.0)
    engine = gated()
    await publish_prompts(bus, 0, 1, 2)
    async with working(await bus_factory(ack_seconds=3600.0), engine, ahead=2) as (worker, task):
        await fakes.until(lambda: engine.running == 2)
        worker.drain()
        async with taken(other, 2) as theirs:
            assert {delivery.key for delivery in theirs} == {"1", "2"}
            assert not task.done()
            engine.gate.set()
            await task
            assert await bus.depth(PROMPTS) == 2


async def test_what_is_given_back_before_it_began_has_used_no_attempt(bus_factory: Any) -> None:
    """The group was prefetched by a draining worker and begun once by a worker that was killed. Its last attempt is
    left."""
    bus = await bus_factory()
    engine = gated()
    await publish_prompts(bus, 0, 1)
    async with working(await bus_factory(), engine, ahead=1, max_attempts=2) as (worker, task):
        source = worker._stages[0]._source
        await fakes.until(lambda: engine.running == 2 and len(source._prefetch._ready) == 1)
        worker.drain()
        engine.gate.set()
        await task
    engine = gated()
    async with working(await bus_factory(), engine, ahead=0, max_attempts=2):
        await fakes.until(lambda: engine.running == 2)
    async with working(await bus_factory(), fakes.Engine(), ahead=0, max_attempts=2):
        records = await first(bus, 2)
        assert {record.key: record.message.error for record in records} == {"0": "", "1": ""}
        while await bus.states(SEGMENTS):  # no note of it remains
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_however_often_it_is_given_back_the_next_attempt_is_the_first(
    bus_factory: Any, max_attempts: int
) -> None:
    bus = await bus_factory()
    attempts = DeliveryAttempts(bus, worker="w0", max_attempts=max_attempts)
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        for number in (1, 2, 3):
            delivery = await anext(deliveries)
            assert (delivery.attempt, await attempts.number(delivery)) == (number, 1)
            await attempts.give_back(delivery)
        delivery = await anext(deliveries)
        await attempts.begin(delivery)
        await delivery.retry()
        assert await attempts.number(await anext(deliveries)) == 2


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_a_delivery_that_never_began_fails_nothing(bus_factory: Any, max_attempts: int) -> None:
    """Four workers prefetch the group and die; the fifth generates it."""
    bus = await bus_factory()
    await publish_prompts(bus, 1)
    for _ in range(4):
        async with taken(bus, 1):
            pass
    async with working(await bus_factory(), fakes.Engine(), ahead=0, max_attempts=max_attempts):
        (record,) = await first(bus, 1)
        while await bus.states(SEGMENTS):  # no note of it remains
            await asyncio.sleep(0.01)
    assert (record.key, record.message.error) == ("1", "")


async def test_a_group_that_is_published_leaves_no_note_that_it_was_begun(bus_factory: Any) -> None:
    """If a group has only one attempt, its first delivery is also noted."""
    bus = await bus_factory()
    await publish_prompts(bus, 1)
    async with working(await bus_factory(), fakes.Engine(), ahead=0, max_attempts=1) as (worker, task):
        await first(bus, 1)
        worker.drain()
        await task
    assert await bus.states(SEGMENTS) == {}


async def test_each_delivery_that_began_is_an_attempt(bus_factory: Any) -> None:
    """After three workers died with it, the next worker fails it; prefetched groups are not failed. Each worker begins
    either group: they come back in any order."""
    bus = await bus_factory()
    await publish_prompts(bus, 1, 2)
    begun: Counter[str] = Counter()
    engine = gated()
    async with working(await bus_factory(), engine, ahead=1, max_attempts=3) as (worker, _):
        source = worker._stages[0]._source
        await fakes.until(lambda: engine.running == 2 and len(source._prefetch._ready) == 1)
    begun.update(("1", "2"))  # of a first delivery whose worker was killed, nobody knows that it did not begin
    while 3 not in begun.values():
        engine = gated()
        async with working(await bus_factory(), engine, ahead=1, max_attempts=3):
            await fakes.until(lambda engine=engine: engine.running == 2)
        begun[str(engine.prompts[0][-1])] += 1
    async with working(await bus_factory(), fakes.Engine(), ahead=1, max_attempts=3):
        records = await first(bus, 2)
    errors = {record.key: record.message.error for record in records}
    assert {key: bool(error) for key, error in errors.items()} == {key: begun[key] == 3 for key in ("1", "2")}
    assert "gave up after 3 attempts" in "".join(errors.values())


async def test_two_workers_that_keep_groups_ready_train_the_same_run(bus_factory: Any, tmp_path: Path) -> None:
    """In synchronous mode, all workers wait for a group that waits at one worker."""
    loop = fakes.Loop(await bus_factory(), tmp_path, steps=4)
    loop.mode, loop.max_staleness = "sync", 0
    async with contextlib.AsyncExitStack() as stack:
        for name in ("w0", "w1"):
            actors = fakes.worker(
                await bus_factory(), fakes.Engine(), name=name, load="on_demand", groups_ahead=lambda: 3
            )
            task = asyncio.create_task(fakes.run_worker(actors))
            stack.callback(task.cancel)
        await loop.run_learner()
    assert [row["staleness/max"] for row in loop.recorder.rows] == [0.0] * 4
    assert await loop.bus.last_sequence(TRAJECTORIES) == 8


async def test_prompts_that_are_no_groups_do_not_stop_a_worker(bus_factory: Any, tmp_path: Path) -> None:
    """They take no slots, so no finished sample triggers a request for another prompt."""
    bus = await bus_factory()
    for number in range(5):
        await bus.publish(dataclasses.replace(PROMPTS, message_type=Progress), progress(1), key=f"no-group-{number}")
    loop = fakes.Loop(bus, tmp_path, steps=2)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(await bus_factory(), fakes.Engine())))
        await loop.run_learner()
    assert loop.backend.steps == 2
