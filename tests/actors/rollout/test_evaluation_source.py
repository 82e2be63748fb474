"""Which evaluation prompts a worker begins, and which it returns without using up an attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.actors.learner.evaluation_round import EvaluationRound
from asyncrl.actors.rollout import prompt_deliveries
from asyncrl.actors.rollout.prompt_deliveries import DeliveryAttempts
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages import PromptGroup, WeightVersion, replace
from asyncrl.messages.evaluation import Evaluation
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS, EVALUATION_PROMPTS, PROMPTS, TRAJECTORIES, Topic
from tests.harness.buses import first, prompt
from tests.harness.evaluation import evaluating_worker, sums
from tests.harness.fakes import Engine, run_worker, until

pytestmark = pytest.mark.timeout(600)

CURRENT = Evaluation(number=0, weights=WeightVersion(incarnation=0, policy_version=0), num_prompts=1, num_pinned=1)
NEXT = replace(CURRENT, number=1)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(max_prompts=64, max_log_bytes=2**20, ack_seconds=30, max_message_bytes=2**20)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_deliveries, "RETRY_SECONDS", 0.001)


@contextlib.asynccontextmanager
async def working(bus: MemoryBus, engine: Engine, **changes: Any) -> AsyncIterator[WeightFollower]:
    actors = evaluating_worker(bus, engine, name="w0", **changes)
    task = asyncio.create_task(run_worker(actors))
    try:
        yield actors[1]
    finally:
        task.cancel()
        await asyncio.wait((task,))


def deliveries_of(bus: MemoryBus, topic: Topic[Any], message: PromptGroup) -> int:
    stored = bus._works[topic.name]._stored
    return stored[str(message.group_id)].attempt if str(message.group_id) in stored else 0


async def on_its_last_attempt(bus: MemoryBus, topic: Topic[Any], message: PromptGroup) -> None:
    """Publish a message that was begun twice by workers that did not come back."""
    await bus.publish(topic, message, key=str(message.group_id))
    attempts = DeliveryAttempts(bus, worker="lost", max_attempts=3)
    for _ in range(2):
        async with bus.consume(topic) as deliveries:  # ends without an ack
            await attempts.begin(await anext(deliveries), message)


async def test_putting_back_a_prompt_uses_no_attempt(bus: MemoryBus) -> None:
    """The prompt belongs to the next evaluation, which this worker does not know yet."""
    early = EvaluationRound(NEXT, [sums(1)]).prompt(0)
    await bus.put(EVALUATION, CURRENT)
    await bus.publish(EVALUATION_PROMPTS, early, key=str(early.group_id))
    async with working(bus, Engine(), is_dedicated=True):
        await until(lambda: deliveries_of(bus, EVALUATION_PROMPTS, early) > 6)  # more than its 3 attempts
    async with bus.consume(EVALUATION_PROMPTS) as deliveries:
        assert await DeliveryAttempts(bus, worker="w1", max_attempts=3).number(await anext(deliveries)) == 1
    await bus.put(EVALUATION, NEXT)
    async with working(bus, Engine(), is_dedicated=True):
        (record,) = await first(bus, 1, topic=EVALUATION_ANSWERS)
        assert record.message.error == ""
        await until(lambda: not bus._states["segments"].present())  # no note of it remains


async def test_last_attempt_of_evaluation_waits_for_training(bus: MemoryBus) -> None:
    engine, asked = Engine(), EvaluationRound(CURRENT, [sums(1)]).prompt(0)
    engine.gate.clear()
    await bus.publish(PROMPTS, prompt(0), key="0")
    async with working(bus, engine):
        await until(lambda: engine.running == 2)
        await on_its_last_attempt(bus, EVALUATION_PROMPTS, asked)
        await bus.put(EVALUATION, CURRENT)
        await until(lambda: deliveries_of(bus, EVALUATION_PROMPTS, asked) > 6)
        assert engine.running == 2
        engine.gate.set()
        (record,) = await first(bus, 1, topic=EVALUATION_ANSWERS)
        assert record.message.error == ""


async def test_last_attempt_of_training_waits_while_version_is_pinned(bus: MemoryBus) -> None:
    await bus.put(EVALUATION, CURRENT)
    await on_its_last_attempt(bus, PROMPTS, prompt(0))
    engine = Engine()
    async with contextlib.AsyncExitStack() as stack:
        async with bus.consume(PROMPTS) as deliveries:  # kept back until the version is held
            await anext(deliveries)
            follower = await stack.enter_async_context(working(bus, engine))
            await until(lambda: follower.gate.is_pinned)
        await until(lambda: deliveries_of(bus, PROMPTS, prompt(0)) > 6)
        assert engine.running == 0
        await bus.put(EVALUATION, replace(CURRENT, is_over=True))
        (record,) = await first(bus, 1, topic=TRAJECTORIES)
        assert record.message.error == ""
