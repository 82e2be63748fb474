"""A rollout function that returns several trajectories: they are parts of one rollout, and each is trained once."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.validator import Validator
from asyncrl.actors.rollout.group_rules import GroupRules, check_rollout
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.config import AlgorithmSection
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import RolloutError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory, TrajectoryGroup, TurnReward
from asyncrl.policies.batching import packing
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes
from tests.harness.groups import trajectory

OWN_PROMPT = [9, 9, 9]
PROMPT = PromptGroup(
    group_id=0,
    prompt_tokens=[1, 2],
    group_size=4,
    sampling=SamplingParams(max_new_tokens=4),  # type: ignore[arg-type]
)


async def compacts(prompt: PromptGroup, generate: Generate, *, index: int) -> Sequence[Trajectory]:
    """Sample 0 compacts its context twice; the other samples answer at once."""
    parts = []
    for tokens in (prompt.prompt_tokens, *[np.array(OWN_PROMPT, np.int32)] * 2)[: 3 if index == 0 else 1]:
        turns = TrajectoryBuilder(tokens)
        turns.add_answer(await generate(turns.tokens))
        parts.append(turns.trajectory())
    return parts


def likes_parts(samples: Sequence[Sample]) -> list[Reward]:
    """Reward 1 for a rollout with several parts."""
    return [Reward(value=float(len(sample.parts) > 1)) for sample in samples]


async def test_trains_each_part_of_a_rollout_once_with_its_advantage(bus: Bus, tmp_path: Path) -> None:
    """Rewards are 1, 0, 0, 0. The advantage is 1.5 in each of the winner's three parts, and -0.5 in all other
    samples."""
    loop = fakes.Loop(
        bus, tmp_path / "run", steps=2, groups_per_batch=1, group_size=4, checkpoint_every=1, function="mine:compacts"
    )
    async with asyncio.TaskGroup() as group:
        reward = fakes.Judge(likes_parts)
        group.create_task(fakes.run_worker(fakes.worker(bus, fakes.Engine(), rollout=compacts, reward=reward)))
        await loop.run_learner()
    for step in loop.backend.trained:
        found: dict[int, float] = {}
        for micro_batch in step:
            for number, place in zip(micro_batch.sequences.tolist(), packing.sequence_slices(micro_batch), strict=True):
                found[number] = float(micro_batch.advantages[place][micro_batch.response_mask[place]][0])
        assert [round(found[number], 4) for number in sorted(found) if number >= 0] == [1.5] * 3 + [-0.5] * 3
    account = await account_with(RecordedRun(loop.directory), bus)
    assert account.problems == ()
    assert (account.trained, account.lost, account.duplicated) == (2, 0, 0)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([], "it gave no trajectory"),
        ([trajectory(), "text"], "it gave a str, not a Trajectory"),
        ([trajectory(reward=1.0), trajectory(reward=0.0)], "a rollout has one"),
        ([trajectory(), trajectory(length=9)], "prompt and answer have 11 tokens, the model's context 9"),
    ],
)
def test_refuses_parts_that_cannot_be_trained(made: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        check_rollout(made, PROMPT, index=0, num_resumed=0, context_tokens=9)


class ByMetadata:
    """A hook that trains no answer whose rollout function says so."""

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        answers = [one for group in groups for one in group.trajectories]
        return batch.without(number for number, one in enumerate(answers) if one.metadata.get("train") is False)


async def leaves_out(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    turns.add_answer(await generate(turns.tokens))
    return turns.trajectory(metadata={"train": index != 1, "seen": ["a", {"b": 0.5}]})


async def test_a_hook_reads_what_the_rollout_function_left_for_it(bus: Bus, tmp_path: Path) -> None:
    loop = fakes.Loop(
        bus, tmp_path, steps=1, algorithm_section=AlgorithmSection(hooks=(f"{__name__}:ByMetadata",)), function="own"
    )
    loop.validator = Validator(bus, hooks=Hooks(loop.algorithm_section.hooks))
    await fakes.run_all(loop, fakes.worker(bus, fakes.Engine(), rollout=leaves_out))
    trained = {
        number
        for micro_batch in loop.backend.trained[0]
        for number, place in zip(micro_batch.sequences.tolist(), packing.sequence_slices(micro_batch), strict=True)
        if micro_batch.response_mask[place].any()
    }
    assert trained == {0, 2}  # of two groups with two answers each


def test_metadata_that_cannot_be_sent_fails_its_sample() -> None:
    table: dict[str, Any] = {"pair": (1, 2)}
    (made,) = check_rollout(
        dataclasses.replace(trajectory(), metadata=table), PROMPT, index=0, num_resumed=0, context_tokens=9
    )
    assert made.metadata == {"pair": [1, 2]}
    wrong: dict[Any, Any]
    for wrong, problem in (
        ({"a": object()}, "object is no type of a message"),
        ({1: 0.5}, "Expected `str`, got `int`"),  # the learner would take the worker for broken
        ({"a": "b" * 2**16}, "are allowed"),
        ({"a": [0] * 2**10}, "more than 1,024 values"),
    ):
        with pytest.raises(ValueError, match=f"the metadata of its trajectory.* {problem}"):
            check_rollout(
                dataclasses.replace(trajectory(), metadata=wrong), PROMPT, index=0, num_resumed=0, context_tokens=9
            )


def test_the_metadata_of_a_large_group_has_less_room_in_each_trajectory() -> None:
    """512 answers of 1,000 values are more than the learner takes in a message; it would blame the worker."""
    large = dataclasses.replace(PROMPT, group_size=512)
    made = dataclasses.replace(trajectory(), metadata={"a": [0] * 1000})
    check_rollout(made, PROMPT, index=0, num_resumed=0, context_tokens=9)
    with pytest.raises(ValueError, match="the metadata of its trajectory has more than 256 values"):
        check_rollout(made, large, index=0, num_resumed=0, context_tokens=9)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (trajectory(reward=math.nan), "^the rollout function set no reward; give one to trajectory"),
        (
            dataclasses.replace(trajectory(reward=math.nan), reward_parts={"timeout": 1.0}),
            r"^the sample took longer than rollout\.options\.timeout_seconds, and nothing says its reward",
        ),
        (trajectory(reward=101.0), r"the reward is 101, beyond reward\.largest = 100"),
        (dataclasses.replace(trajectory(), reward_parts={"a": 1e300}), r"a is 1e\+300, beyond reward\.largest = 100"),
        (dataclasses.replace(trajectory(), reward_parts={"": 1.0}), "the name of a reward's part must have 1 to"),
        (dataclasses.replace(trajectory(), reward_parts={str(n): 1.0 for n in range(65)}), "65 parts, over 64"),
        (
            dataclasses.replace(trajectory(), turn_rewards=(TurnReward(start=0, reward=-1e9),)),
            r"the reward of turn 0 is -1e\+09, beyond reward\.largest = 100",
        ),
    ],
)
def test_invalid_reward_fails_its_sample(made: Trajectory, problem: str) -> None:
    rules = GroupRules(largest_reward=100.0, needs_reward=True)
    with pytest.raises(RolloutError, match=problem):
        check_rollout(made, PROMPT, index=0, num_resumed=0, context_tokens=9, rules=rules)
