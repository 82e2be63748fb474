"""A draining worker whose group waits for weights: it waits for a load, but not for a version that may never come."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from asyncrl.actors.rollout.prompt_deliveries import DeliveryAttempts
from asyncrl.bus.port import Bus
from asyncrl.messages import WeightVersion
from asyncrl.messages.topics import PROMPTS, SEGMENTS, TRAJECTORIES, WEIGHTS
from asyncrl.weights.port import LoadReport
from tests.harness import fakes
from tests.harness.buses import first, prompt

MISSING = 3


async def waiting_for_weights(
    bus: Bus, *, max_attempts: int = 3, engine: fakes.Engine | None = None
) -> tuple[Any, asyncio.Task[None]]:
    """Return a worker and its task. Its only group asks for a version that does not exist yet."""
    await bus.publish(PROMPTS, dataclasses.replace(prompt(0), min_policy_version=MISSING), key="0")
    actors = fakes.worker(bus, engine or fakes.Engine(), max_attempts=max_attempts)
    running = asyncio.create_task(fakes.run_worker(actors))
    await fakes.until(lambda: any(wait.what.startswith("weights") for wait in actors[0].heartbeat().waits))
    return actors[0], running


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_draining_worker_gives_back_groups_whose_weights_are_not_announced(
    bus_factory: Any, max_attempts: int
) -> None:
    bus = await bus_factory()
    for _ in range(3):  # for any number of workers, and for any delivery
        worker, running = await waiting_for_weights(await bus_factory(), max_attempts=max_attempts)
        worker.drain()
        await running
        assert (await bus.depth(PROMPTS), await bus.depth(TRAJECTORIES)) == (1, 0)
    attempts = DeliveryAttempts(bus, worker="w1", max_attempts=max_attempts)
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        assert (delivery.attempt, await attempts.number(delivery)) == (4, 1)
    assert all("begun" not in key for key in await bus.states(SEGMENTS))


async def test_draining_worker_waits_for_a_load_in_progress(bus: Bus) -> None:
    engine = SlowLoads()
    worker, running = await waiting_for_weights(bus, engine=engine)
    await bus.put(WEIGHTS, WeightVersion(incarnation=0, policy_version=MISSING, uri="/w/3"))
    await engine.loading.wait()
    worker.drain()
    await fakes.until(lambda: worker.heartbeat().phase == "draining")
    assert not running.done()
    engine.may_load.set()
    await running
    (record,) = await first(bus, 1)
    assert record.message.error == "" and await bus.depth(PROMPTS) == 0


class SlowLoads(fakes.Engine):
    """Loads when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.loading, self.may_load = asyncio.Event(), asyncio.Event()

    async def load(self, weights: WeightVersion) -> LoadReport:
        self.loading.set()
        await self.may_load.wait()
        return await super().load(weights)
