"""Prompt groups on their way to a worker: how many it holds, how attempts are counted, and what is given back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout.prompt_deliveries import DeliveryAttempts
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus
from asyncrl.messages import Progress
from asyncrl.messages.topics import PROGRESS, PROMPTS, SEGMENTS, TRAJECTORIES
from tests.conftest import BUS_SIZES
from tests.harness import fakes
from tests.harness.buses import first, progress, prompt, publish_prompts, taken

NUM_SLOTS = 2  # one group of tests.harness.buses.prompt


@contextlib.asynccontextmanager
async def working(bus: Bus, engine: fakes.Engine, **changes: Any) -> AsyncIterator[Any]:
    """Yield (worker, task); the worker is killed at the end of the block."""
    actors = fakes.worker(bus, engine, **({"max_running": NUM_SLOTS} | changes))
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


async def test_draining_worker_returns_at_once_what_it_has_not_begun(bus_factory: Any) -> None:
    """The bus itself would not redeliver the group before the test ends."""
    bus, other = await bus_factory(ack_seconds=3600.0), await bus_factory(ack_seconds=3600.0)
    engine = gated()
    await publish_prompts(bus, 0, 1)
    async with working(await bus_factory(ack_seconds=3600.0), engine, max_running=NUM_SLOTS + 1) as (worker, task):
        await fakes.until(lambda: engine.running == 4)  # a third slot is free: the second group may begin
        await publish_prompts(bus, 2)
        worker.drain()
        async with taken(other, 1) as theirs:
            assert {delivery.key for delivery in theirs} == {"2"}
            assert not task.done()
            engine.gate.set()
            await task
            assert await bus.depth(PROMPTS) == 1


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_giving_back_uses_no_attempt(bus_factory: Any, max_attempts: int) -> None:
    bus = await bus_factory()
    attempts = DeliveryAttempts(bus, worker="w0", max_attempts=max_attempts)
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        for number in (1, 2, 3):
            delivery = await anext(deliveries)
            assert (delivery.attempt, await attempts.number(delivery)) == (number, 1)
            await delivery.retry()
        delivery = await anext(deliveries)
        await attempts.begin(delivery, prompt(1))
        await delivery.retry()
        assert await attempts.number(await anext(deliveries)) == 2


async def test_a_beginning_counts_although_the_bus_loses_what_is_not_waited_for() -> None:
    class Lossy(MemoryBus):
        async def put(self, topic: Any, message: Any, *, key: str = "", is_sure: bool = True) -> None:
            if is_sure:
                await super().put(topic, message, key=key)

    bus = Lossy(**BUS_SIZES, max_message_bytes=2**20)
    attempts = DeliveryAttempts(bus, worker="w0", max_attempts=3)
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        await attempts.begin(delivery, prompt(1))
        await delivery.retry()
        assert await attempts.number(await anext(deliveries)) == 2


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_delivery_that_never_began_is_no_attempt(bus_factory: Any, max_attempts: int) -> None:
    """Four workers prefetch the group and die; the fifth generates it."""
    bus = await bus_factory()
    await publish_prompts(bus, 1)
    for _ in range(4):
        async with taken(bus, 1):
            pass
    async with working(await bus_factory(), fakes.Engine(), max_attempts=max_attempts):
        (record,) = await first(bus, 1)
        while await bus.states(SEGMENTS):  # no note of it remains
            await asyncio.sleep(0.01)
    assert (record.key, record.message.error) == ("w0/1", "")


async def test_group_fails_after_max_attempts_that_began(bus_factory: Any) -> None:
    bus = await bus_factory()
    ticket = "0" * 32
    await bus.publish(PROMPTS, dataclasses.replace(prompt(1), ticket=ticket), key="1")
    for _ in range(3):
        engine = gated()
        async with working(await bus_factory(), engine, max_attempts=3):  # killed while it generates
            await fakes.until(lambda engine=engine: engine.running == 2)
    async with working(await bus_factory(), fakes.Engine(), max_attempts=3):
        (record,) = await first(bus, 1)
    assert "gave up after 3 attempts" in record.message.error
    assert record.key == f"w0/1-{ticket}"


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_attempts_under_an_earlier_incarnation_of_the_learner_do_not_count(
    bus_factory: Any, max_attempts: int
) -> None:
    """The machine was taken away four times while the group was made."""
    bus = await bus_factory()
    attempts = DeliveryAttempts(bus, worker="w0", max_attempts=max_attempts)
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        for incarnation in range(4):
            await bus.put(PROGRESS, progress(0, incarnation=incarnation))
            delivery = await anext(deliveries)
            assert await attempts.number(delivery) == 1
            await attempts.begin(delivery, prompt(1))
            await delivery.retry()
        delivery = await anext(deliveries)
        assert await attempts.number(delivery) == 2
        await attempts.forget(await attempts.begin(delivery, prompt(1)))
        await delivery.retry()
        assert await attempts.number(await anext(deliveries)) == 2


async def test_two_workers_share_a_synchronous_run(bus_factory: Any, tmp_path: Path) -> None:
    """All workers would wait for a group that one worker holds without beginning it."""
    loop = fakes.Loop(await bus_factory(), tmp_path, steps=4)
    loop.mode, loop.max_staleness = "sync", 0
    async with contextlib.AsyncExitStack() as stack:
        for name in ("w0", "w1"):
            actors = fakes.worker(await bus_factory(), fakes.Engine(), name=name, load="on_demand")
            task = asyncio.create_task(fakes.run_worker(actors))
            stack.callback(task.cancel)
        await loop.run_learner()
    assert [row["staleness/max"] for row in loop.recorder.rows] == [0.0] * 4
    assert await loop.bus.last_sequence(TRAJECTORIES) == 8


async def test_malformed_prompts_do_not_stop_a_worker(bus_factory: Any, tmp_path: Path) -> None:
    """They take no slots, so no finished sample triggers a request for another prompt."""
    bus = await bus_factory()
    for number in range(5):
        await bus.publish(dataclasses.replace(PROMPTS, message_type=Progress), progress(1), key=f"no-group-{number}")
    loop = fakes.Loop(bus, tmp_path, steps=2)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(await bus_factory(), fakes.Engine())))
        await loop.run_learner()
    assert loop.backend.steps == 2
