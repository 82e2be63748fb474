"""A bad worker costs only its own groups. Lies through the real learner, on both buses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl import messages
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.port import Bus
from asyncrl.errors import RewardError
from asyncrl.messages.topics import ACTORS, EVENTS, PROMPTS, QUARANTINE, TRAJECTORIES
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes, groups
from tests.harness.fakes import Engine, Loop, run_worker, until, worker


@contextlib.asynccontextmanager
async def asking_for(loop: Loop, *group_ids: int) -> AsyncIterator[asyncio.Task[Any]]:
    """Yield the running learner once it has requested these groups; drain it at the end of the block."""
    learner = asyncio.create_task(loop.run_learner())
    while not {str(group_id) for group_id in group_ids} <= await loop.bus.keys(PROMPTS):
        await asyncio.sleep(0.01)
    yield learner
    loop.learner.drain()
    await learner


async def events(bus: Bus, kind: str) -> list[dict[str, Any]]:
    last = await bus.last_sequence(EVENTS)
    async with bus.read(EVENTS) as records:
        found = [(await anext(records)).message for _ in range(last)]
    return [event.data for event in found if event is not None and event.kind == kind]


async def test_a_worker_on_which_alone_every_group_fails_is_quarantined_and_the_others_go_on(
    bus_factory: Any, bus: Bus, tmp_path: Path
) -> None:
    def broken(samples: Sequence[Sample]) -> Sequence[Reward]:
        raise RewardError("judge is not reachable")

    held = Engine()
    held.gate.clear()
    # enabled; the fake's logprobs are within the bound
    judged = Validator(bus, logprob_check=LogprobMismatch(bound=10.0, every=1000))
    loop = Loop(bus, tmp_path, max_failed_in_a_row=8, validator=judged)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), held, name="w1", max_running=2)))
        while "w1" not in await bus.states(ACTORS):
            await asyncio.sleep(0.01)
        bad = group.create_task(run_worker(worker(await bus_factory(), Engine(), reward=fakes.Judge(broken))))
        learner = group.create_task(loop.run_learner())
        while "w0" not in await bus.states(QUARANTINE):
            await asyncio.sleep(0.01)
        held.gate.set()
        await learner
        bad.cancel()
    assert "judge is not reachable" in (await bus.states(QUARANTINE))["w0"].reason
    assert loop.backend.steps == 4


async def test_a_worker_that_keeps_prompts_and_never_answers_costs_a_wait_and_the_run_goes_on(
    bus: Bus, bus_factory: Any, tmp_path: Path
) -> None:
    """It keeps one batch within a window of three. The learner holds once for both groups without success, and for no
    later groups."""
    loop = Loop(bus, tmp_path, steps=10**6, wait_for_stragglers=True, staleness={"wait_seconds": 0.05})
    theirs = await bus_factory()
    async with asyncio.TaskGroup() as group, theirs.consume(PROMPTS) as deliveries:
        learner = group.create_task(loop.run_learner())
        kept = [await anext(deliveries) for _ in range(2)]
        honest = group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await until(lambda: loop.backend.steps >= 12)
        loop.learner.drain()
        await learner
        honest.cancel()
        for delivery in kept:
            await delivery.ack()
    held = [float(row["learner/straggler_wait_seconds"]) >= 0.05 for row in loop.recorder.rows]
    assert held.count(True) == 1
    assert loop.table.counts["dropped"] == 0


async def test_a_group_that_was_not_asked_for_is_failed_and_another_is_generated(
    bus: Bus, bus_factory: Any, tmp_path: Path
) -> None:
    """One answer instead of the requested two; a prompt of its own; a worker name that is not a valid key."""
    loop = Loop(bus, tmp_path)
    nameless = messages.replace(groups.group(2), prompt_tokens=np.array([1, 6], np.int32), worker="w\n" * 500)
    async with asking_for(loop, 0, 1, 2) as learner:
        for number, group in enumerate((groups.group(0, rewards=(1.0,)), groups.group(1), nameless)):
            await bus.publish(TRAJECTORIES, group, key=str(number))
        await until(lambda: loop.table.counts["failed"] == 3)
        helper = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
        await learner
        await helper
    assert loop.trained_groups == 8
    errors = [event["error"] for event in await events(bus, "failed")]
    for error, words in zip(errors, ("1 answers", "not the one that was asked", "200 letters"), strict=True):
        assert words in error
