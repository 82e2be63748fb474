"""What a user's RolloutFn can rely on: the index of its sample, and a budget for each turn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.actors.learner.validator import MOST_IMPOSSIBLE, Validator
from asyncrl.actors.rollout.training import TrainingSink
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.environments.builtin import single_turn
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import HopelessError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.rollout import failed_group
from asyncrl.messages.topics import PROMPTS, QUARANTINE
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.policies.groups.validation import GroupValidation
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.buses import first

GROUPS_SAMPLING = SamplingParams(max_new_tokens=4)


class Engine(fakes.Engine):
    """Records its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[SamplingParams, int]] = []

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        self.asked.append((sampling, seed))
        return await super().generate(prompt_tokens, sampling, seed=seed)


async def train(rollout: Any, directory: Path) -> tuple[Engine, fakes.Loop]:
    """Train one step on two groups of two samples."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop, engine = fakes.Loop(bus, directory, steps=1), Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, engine, rollout=rollout)))
        await loop.run_learner()
    return engine, loop


async def test_rollout_function_gets_its_sample_index(tmp_path: Path) -> None:
    made: set[tuple[int, int]] = set()

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        made.add((prompt.group_id, index))
        return await single_turn(prompt, generate, index=index)

    await train(rollout, tmp_path)
    assert {(group_id, index) for group_id, index in made if group_id < 2} == {(0, 0), (0, 1), (1, 0), (1, 1)}


async def test_turn_may_have_its_own_budget(tmp_path: Path) -> None:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        await generate(prompt.prompt_tokens, max_new_tokens=2 + index)
        return await single_turn(prompt, generate, index=index)

    engine, _ = await train(rollout, tmp_path)
    asked = [sampling for sampling, _ in engine.asked]
    assert {sampling.max_new_tokens for sampling in asked} == {2, 3, 4}
    assert {of_the_groups_length(sampling) for sampling in asked} == {GROUPS_SAMPLING}
    assert len({seed for _, seed in engine.asked}) == len(engine.asked)


def of_the_groups_length(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters with the group's length; all other values stay the group's."""
    return SamplingParams(
        max_new_tokens=GROUPS_SAMPLING.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
    )


async def test_group_continues_without_failed_sample_if_enough_are_left() -> None:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        if index >= prompt.group_size - prompt.group_id:
            raise ValueError("this one")
        return await single_turn(prompt, generate, index=index)

    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    worker = fakes.worker(bus, fakes.Engine(), rollout=rollout, min_group=2)
    running = asyncio.ensure_future(fakes.run_worker(worker))
    for group_id in range(4):  # of four samples, as many fail as the group's number
        prompt = PromptGroup(group_id=group_id, prompt_tokens=[1, 2], group_size=4, sampling=GROUPS_SAMPLING)
        await bus.publish(PROMPTS, prompt, key=str(group_id))
    made = {record.message.group_id: record.message for record in await first(bus, 4)}
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    sizes = {
        group_id: (len(group.trajectories), group.cancelled, group.failed_samples) for group_id, group in made.items()
    }
    assert sizes == {0: (4, 0, 0), 1: (3, 1, 1), 2: (2, 2, 2), 3: (0, 0, 0)}
    assert made[3].error.startswith("the rollout function raised ValueError: this one (test_rollout_functions.py:")


@pytest.mark.parametrize(
    ("exits", "name"), [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
async def test_exit_of_rollout_function_fails_only_its_group(tmp_path: Path, exits: BaseException, name: str) -> None:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        if prompt.group_id == 0:
            raise exits
        return await single_turn(prompt, generate, index=index)

    before = signal.signal(signal.SIGINT, lambda *_: None)  # as in a worker, where Ctrl-C raises nothing
    try:
        _, loop = await train(rollout, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert loop.recorder.rows[-1]["staleness/failed_groups"] == 1
    (record,) = [one for one in await first(loop.bus, 3) if one.key == "w0/0"]
    assert record.message.error == f"the rollout function raised {name}"


CONTEXT = 32


async def train_overlong(directory: Path, **worker: Any) -> fakes.Loop:
    """Run two steps; a user's function makes the first groups too long for the model's context."""

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = TrajectoryBuilder(prompt.prompt_tokens)
        turns.add_answer(await generate(turns.tokens))
        if prompt.group_id < MOST_IMPOSSIBLE:
            turns.add_observation(range(CONTEXT))
        return turns.trajectory()

    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    judges = Validator(
        bus, validation=GroupValidation(context_tokens=CONTEXT), logprob_check=LogprobMismatch(bound=9.0, every=100)
    )
    loop = fakes.Loop(bus, directory, steps=2, validator=judges)
    working = asyncio.create_task(fakes.run_worker(fakes.worker(bus, fakes.Engine(), rollout=rollout, **worker)))
    try:
        await loop.run_learner()
    finally:
        working.cancel()
        await asyncio.wait((working,))
    return loop


async def test_conversations_too_long_for_the_model_fail_their_groups_and_nobody_is_quarantined(tmp_path: Path) -> None:
    loop = await train_overlong(tmp_path, context_tokens=CONTEXT)
    assert loop.recorder.rows[-1]["staleness/failed_groups"] == MOST_IMPOSSIBLE
    assert await loop.bus.states(QUARANTINE) == {}


async def test_a_worker_that_sends_them_all_the_same_is_quarantined_with_the_reason(tmp_path: Path) -> None:
    reason = f"3 impossible groups, the last because: prompt and answer have .* the model's context {CONTEXT}$"
    with pytest.raises(HopelessError, match=reason):
        await train_overlong(tmp_path)


async def test_group_holds_slots_only_for_unfinished_samples(tmp_path: Path) -> None:
    """Two places and groups of two. Sample 1 of each group is held back, so each finished sample 0 admits another
    group."""
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


async def test_sample_over_its_time_limit_fails_its_group(tmp_path: Path) -> None:
    async def stuck(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = TrajectoryBuilder(prompt.prompt_tokens)
        turns.add_answer(await generate(turns.tokens))
        if prompt.group_id == index == 0:
            await asyncio.Event().wait()
        return turns.trajectory(reward=1.0)

    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop = fakes.Loop(bus, tmp_path, steps=1)
    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, Engine(), rollout=stuck, sample_seconds=0.5)))
        await loop.run_learner()
    assert loop.recorder.rows[-1]["staleness/failed_groups"] == 1


class Bus:
    """Records published messages, encoded and decoded again."""

    def __init__(self) -> None:
        self.published: list[TrajectoryGroup] = []

    async def publish(self, topic: Any, group: TrajectoryGroup, *, key: str) -> None:
        self.published.append(decode(encode(group), TrajectoryGroup))


async def test_text_that_cannot_be_encoded_fails_its_group() -> None:
    bus: Any = Bus()
    sink = TrainingSink(bus, worker="w1", waits=WaitTracker())
    one = Trajectory(
        tokens=np.array([1], np.int32),
        response_mask=np.array([True]),
        behavior_logprobs=np.array([-1.0], np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        reward=1.0,
        reward_parts={"\ud800": 1.0},
    )
    group = TrajectoryGroup(group_id=3, prompt_tokens=np.array([1], np.int32), trajectories=(one,))
    await sink.publish(group, prompt=None)
    await sink.publish(failed_group(4, worker="w1", error="it said \ud800"), prompt=None)
    assert [(made.group_id, made.trajectories) for made in bus.published] == [(3, ()), (4, ())]
    assert "cannot send this" in bus.published[0].error
    assert bus.published[1].error == "it said ?"
