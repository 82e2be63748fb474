"""A rollout function that gives several trajectories: they are the parts of one rollout, and each is trained once."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.rollout.rollout_parts import parts_of
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory
from asyncrl.policies.batching import packing
from asyncrl.protocols import Bus, Generate, Reward, Sample
from asyncrl.rollouts.trajectory_builder import TrajectoryBuilder
from asyncrl.run.recorded.account import account_with
from asyncrl.run.recorded.run_folder import RecordedRun
from tests.harness import fakes
from tests.harness.groups import trajectory

OWN_PROMPT = [9, 9, 9]


async def compacts(prompt: PromptGroup, generate: Generate, *, index: int) -> Sequence[Trajectory]:
    """Sample 0 compacts its context twice; the others answer at once."""
    parts = []
    for tokens in (prompt.prompt_tokens, *[np.array(OWN_PROMPT, np.int32)] * 2)[: 3 if index == 0 else 1]:
        turns = TrajectoryBuilder(tokens)
        turns.answered(await generate(turns.tokens))
        parts.append(turns.trajectory())
    return parts


def likes_parts(samples: Sequence[Sample]) -> list[Reward]:
    """1 for a rollout that has several parts."""
    return [Reward(value=float(len(sample.parts) > 1)) for sample in samples]


async def test_the_parts_of_a_rollout_are_trained_once_each_with_its_advantage(bus: Bus, tmp_path: Path) -> None:
    """Rewards 1, 0, 0, 0, where the winner has three parts: 1.5 in each of them, and -0.5 in the others."""
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
            for number, place in zip(micro_batch.documents.tolist(), packing.documents(micro_batch), strict=True):
                found[number] = float(micro_batch.advantages[place][micro_batch.response_mask[place]][0])
        assert [round(found[number], 4) for number in sorted(found) if number >= 0] == [1.5] * 3 + [-0.5] * 3
    account = await account_with(RecordedRun(loop.directory), bus)
    assert account.problems == ()
    assert (account.trained, account.lost, account.duplicated) == (2, 0, 0)


def test_a_worker_numbers_the_parts_and_gives_them_one_reward() -> None:
    prompt = PromptGroup(
        group_id=0,
        prompt_tokens=[1, 2],
        group_size=4,
        sampling=SamplingParams(max_new_tokens=4),  # type: ignore[arg-type]
    )
    same = dataclasses.replace(trajectory(reward=math.nan), prompt_tokens=np.array([1, 2], np.int32))
    own = dataclasses.replace(trajectory(reward=0.5), prompt_tokens=np.array([7], np.int32))
    made = parts_of([same, own], prompt, index=2, num_resumed=0, context_tokens=9)
    assert [(one.rollout, one.part, one.reward, one.prompt_tokens.tolist()) for one in made] == [
        (2, 0, 0.5, []),  # it follows the group's prompt, which need not be sent again
        (2, 1, 0.5, [7]),
    ]
    assert [one.resumed for one in made] == [0, 0]
    taken_over = parts_of([same, own], prompt, index=2, num_resumed=1, context_tokens=9)
    assert [one.resumed for one in taken_over] == [3, 3], "nobody can say which of them it is in"
    (alone,) = parts_of(own, prompt, index=2, num_resumed=1, context_tokens=9)
    assert alone.resumed == 1


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([], "it gave no trajectory"),
        ([trajectory(), "text"], "it gave a str, not a Trajectory"),
        ([trajectory(reward=1.0), trajectory(reward=0.0)], "a rollout has one"),
        ([trajectory(), trajectory(length=9)], "prompt and answer have 11 tokens, the model's context 9"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused_with_the_reason(made: Any, problem: str) -> None:
    prompt = PromptGroup(
        group_id=0,
        prompt_tokens=[1, 2],
        group_size=4,
        sampling=SamplingParams(max_new_tokens=4),  # type: ignore[arg-type]
    )
    with pytest.raises((TypeError, ValueError), match=problem):
        parts_of(made, prompt, index=0, num_resumed=0, context_tokens=9)
