"""A worker that drains, once or twice."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from asyncrl.actors.rollout import prompt_deliveries
from asyncrl.actors.rollout.prompt_deliveries import DeliveryAttempts
from asyncrl.bus.port import Bus
from asyncrl.messages import WeightVersion
from asyncrl.messages.topics import PROMPTS, SEGMENTS, TRAJECTORIES, WEIGHTS
from asyncrl.weights.port import LoadReport
from tests.harness import fakes
from tests.harness.buses import first, prompt
from tests.harness.partial_rollouts import Worker, publish_prompt

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


async def test_second_drain_hands_over_unfinished_groups(bus: Bus) -> None:
    await publish_prompt(bus, 0)
    leaving, heir = Worker(bus, "w0"), Worker(bus, "w1")
    actors = fakes.worker(
        bus, leaving.engine, name="w0", max_attempts=3, max_running=64, partial_rollouts=leaving.partial_rollouts
    )
    running = asyncio.create_task(fakes.run_worker(actors))
    await leaving.begun(2)
    await leaving.engine.steps(41)
    actors[0].drain()
    await leaving.engine.steps(1)
    assert not running.done()  # told once, it finishes its work
    actors[0].drain()
    await running
    assert await bus.depth(PROMPTS) == 1
    async with heir.working():
        await heir.begun(2)
        (group,) = await heir.until_published(bus, 1)
    assert [len(trajectory.tokens) for trajectory in group.trajectories] == [100, 100]
    assert leaving.engine.generated + heir.engine.generated - 200 == 2  # the newest token of each answer
    assert await bus.depth(PROMPTS) == 0


async def test_returns_second_copy_of_a_held_group(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that holds the prompt returns the second copy. Both answer; the learner takes the first answer."""
    monkeypatch.setattr(prompt_deliveries, "RETURN_SECONDS", 0.01)
    await publish_prompt(bus, 0)
    slow, idle = Worker(bus, "w0"), Worker(bus, "w1")
    async with slow.working():
        await slow.begun(2)
        await bus.withdraw(PROMPTS, key="0")
        await publish_prompt(bus, 0, again=True)
        async with idle.working():
            await idle.begun(2)
            assert len(slow.engine.answers) == 2
            await idle.until_published(bus, 1)
            while not all(answer.done.done() for answer in slow.engine.answers):
                await slow.engine.steps(1)
                await asyncio.sleep(0.0001)
    assert await bus.depth(PROMPTS) == 0
