"""What a user's RolloutFn can count on: which sample it makes, and a budget of its own for each turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollouts import single_turn
from asyncrl.bus.memory import MemoryBus
from asyncrl.messages import PromptGroup, Sampling, Trajectory
from asyncrl.protocols import Generate, Generation, Partial
from tests import fakes
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

GROUPS_SAMPLING = Sampling(max_new_tokens=4)


class Engine(fakes.Engine):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Sampling, int]] = []

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        self.asked.append((sampling, seed))
        return await super().generate(prompt_tokens, sampling, seed=seed)


async def train(rollout: Any, directory: Path) -> tuple[Engine, fakes.Loop]:
    """One step on two groups of two samples."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop, engine = fakes.Loop(bus, directory, steps=1), Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, engine, rollout=rollout)))
        await loop.run_learner()
    return engine, loop


async def test_a_rollout_knows_which_sample_of_its_group_it_makes(tmp_path: Path) -> None:
    made: set[tuple[int, int]] = set()

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        made.add((prompt.group_id, index))
        return await single_turn(prompt, generate, index=index)

    await train(rollout, tmp_path)
    assert {(group_id, index) for group_id, index in made if group_id < 2} == {(0, 0), (0, 1), (1, 0), (1, 1)}


async def test_a_turn_may_have_a_budget_of_its_own(tmp_path: Path) -> None:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        await generate(prompt.prompt_tokens, max_new_tokens=2 + index)
        return await single_turn(prompt, generate, index=index)

    engine, _ = await train(rollout, tmp_path)
    asked = [sampling for sampling, _ in engine.asked]
    assert {sampling.max_new_tokens for sampling in asked} == {2, 3, 4}
    assert {of_the_groups_length(sampling) for sampling in asked} == {GROUPS_SAMPLING}
    assert len({seed for _, seed in engine.asked}) == len(engine.asked)


def of_the_groups_length(sampling: Sampling) -> Sampling:
    """The sampling with the group's length: all else stays the group's."""
    return Sampling(
        max_new_tokens=GROUPS_SAMPLING.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
    )


async def test_a_budget_that_is_none_at_all_buries_the_group(tmp_path: Path) -> None:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        if prompt.group_id == 0:
            await generate(prompt.prompt_tokens, max_new_tokens=0)
        return await single_turn(prompt, generate, index=index)

    _, loop = await train(rollout, tmp_path)
    assert loop.recorder.rows[-1]["staleness/buried_groups"] == 1
    assert loop.trained_groups == 2


async def test_a_group_whose_longest_answer_is_missing_holds_one_place(tmp_path: Path) -> None:
    """Two places, groups of two: sample 1 of each group is held back, so a group is taken with every sample 0 done."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop, gate, begun = fakes.Loop(bus, tmp_path, steps=1), asyncio.Event(), list[tuple[int, int]]()

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        begun.append((prompt.group_id, index))
        if index == 1:
            await gate.wait()
        return await single_turn(prompt, generate, index=index)

    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, fakes.Engine(), rollout=rollout, max_running=2)))
        learner = group.create_task(loop.run_learner())
        await fakes.until(lambda: len({group_id for group_id, _ in begun}) == 2)
        assert {index for _, index in begun} == {0, 1}
        gate.set()
        await learner
    assert loop.trained_groups == 2
