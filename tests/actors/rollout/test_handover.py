"""A worker told twice to leave hands over its generated tokens, and loses at most one token per answer."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.actors.rollout import prompt_deliveries
from asyncrl.bus.port import Bus
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from tests.harness import fakes
from tests.harness.partial_rollouts import Worker, publish_prompt


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
    """The worker that holds the prompt returns the second copy. Either worker may answer; the log gets one answer."""
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
    assert await bus.last_sequence(TRAJECTORIES) == 1
