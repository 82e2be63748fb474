"""Guarantees of the actors when the learner restarts from a checkpoint, on both buses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import BackendError, HopelessError
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.messages.topics import PROGRESS, PROMPTS
from tests.harness.buses import progress
from tests.harness.fakes import Engine, Loop, run_all, run_worker, single_turn, until, worker


async def test_a_killed_learner_trains_nothing_twice_in_the_history_it_keeps(bus_factory: Any, tmp_path: Path) -> None:
    """It dies in step 5 with a checkpoint at 4. The next incarnation continues from there to the end."""
    first = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)

    def die(step: int) -> None:
        if step == 5:
            raise BackendError("killed")

    first.backend.before_step = die
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    second = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)
    await second.run_learner(resume=True)
    await task
    assert second.learner.table.incarnation == 1
    assert second.backend.steps == 8
    assert second.trained_groups == 2 * (8 - 4)
    # too stale for the second incarnation's versions
    dropped = int(second.recorder.rows[-1]["staleness/dropped_groups"])
    assert len(second.table.done) == 16 + dropped
    assert await second.bus.last_sequence(PROMPTS) == 16 + dropped  # no prompt was published twice


async def test_a_resumed_learner_publishes_again_what_the_bus_lost(tmp_path: Path, bus_factory: Any) -> None:
    """The bus is new and empty. Everything outstanding is published again, and the ids continue."""
    first = Loop(await bus_factory(), tmp_path, steps=2, checkpoint_every=1)
    await run_all(first, worker(await bus_factory(), Engine()))
    empty = MemoryBus(max_prompts=64, max_log_bytes=2**24, ack_seconds=30, max_message_bytes=2**20)
    second = Loop(empty, tmp_path, steps=5, checkpoint_every=1)
    await run_all(second, worker(empty, Engine()), resume=True)
    assert second.backend.steps == 5
    assert len(second.table.done) == 10


@pytest.mark.parametrize("every", [0, 1])
async def test_draining_the_learner_leaves_a_checkpoint_to_go_on_from(loop: Loop, bus_factory: Any, every: int) -> None:
    loop.steps, loop.checkpoint_every = 50, every  # 1: the step at which it drains already has its checkpoint
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))

    def drain(step: int) -> None:
        if step == 2:
            running.call_soon_threadsafe(loop.learner.drain)

    running = asyncio.get_running_loop()
    loop.backend.before_step = drain
    await loop.run_learner()
    assert not (await loop.bus.states(PROGRESS))[""].finished
    stopped_at = loop.learner.step
    again = Loop(await bus_factory(), loop.directory, steps=stopped_at + 2)
    await again.run_learner(resume=True)
    await task
    assert again.backend.steps == stopped_at + 2


async def test_a_learner_that_another_one_has_superseded_ends(loop: Loop, bus_factory: Any) -> None:
    """It was frozen, and its run was resumed elsewhere. It must not train on beside its successor."""
    loop.steps, loop.checkpoint_every = 10_000, 0
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))

    def supersede(step: int) -> None:
        if step >= 2:  # as the successor does with each of its steps
            asyncio.run_coroutine_threadsafe(loop.bus.put(PROGRESS, progress(1, incarnation=1)), running).result()

    running = asyncio.get_running_loop()
    loop.backend.before_step = supersede
    with pytest.raises(
        HopelessError, match="another learner has taken over this run .incarnation 1, step 1.; this one"
    ):
        await loop.run_learner()
    task.cancel()


async def test_a_resumed_learner_waits_for_stragglers_of_its_life_before(bus_factory: Any, tmp_path: Path) -> None:
    """Group 0 is in flight while the learner drains and restarts; no incarnation drops it."""
    released = asyncio.Event()

    async def slow(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
        made = await single_turn(prompt, generate, index=index)
        if prompt.group_id == 0:
            await released.wait()
        return made

    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine(), rollout=slow, max_running=64)))
    first = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=1, wait_for_stragglers=True)
    incarnation = asyncio.create_task(first.run_learner())
    await until(lambda: first.backend.steps == 2)  # the step from version 2 would make group 0 too stale
    first.learner.drain()
    await incarnation
    second = Loop(await bus_factory(), tmp_path, steps=8, wait_for_stragglers=True)
    incarnation = asyncio.create_task(second.run_learner(resume=True))
    await until(lambda: hasattr(second, "table") and len(second.table.buffered) >= 2)
    await asyncio.sleep(0.2)
    assert second.backend.steps == 2
    released.set()
    await incarnation
    await task
    assert second.recorder.rows[-1]["staleness/dropped_groups"] == 0
    assert second.backend.steps == 8


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
async def test_workers_ahead_of_a_resumed_learner_take_its_weights(bus_factory: Any, tmp_path: Path, mode: str) -> None:
    """They hold a rolled-back version with a higher number; a prompt's version alone does not reveal that."""
    settings: dict[str, Any] = {
        "steps": 8,
        "mode": mode,
        "max_staleness": int(mode == "one_step_off"),
        "checkpoint_every": 3,
    }
    first = Loop(await bus_factory(), tmp_path, **settings)

    def die(step: int) -> None:
        if step == 5:
            raise BackendError("killed")

    first.backend.before_step = die
    engine = Engine()
    task = asyncio.create_task(run_worker(worker(await bus_factory(), engine, load="on_demand")))
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    second = Loop(await bus_factory(), tmp_path, **settings)
    await second.run_learner(resume=True)
    await task
    assert engine.version[0] == 1
    assert second.backend.steps == 8
