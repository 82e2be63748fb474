"""How a group describes rollouts of several parts, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from asyncrl.errors import MessageError
from asyncrl.messages import Trajectory, TrajectoryGroup, TurnReward
from asyncrl.messages.codec import decode, encode
from tests.harness.groups import trajectory


def part(rollout: int, number: int = 0, *, reward: float = 0.0) -> Trajectory:
    return dataclasses.replace(trajectory(reward=reward), rollout=rollout, part=number)


def grouped(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=0, prompt_tokens=np.array([1, 2], np.int32), trajectories=trajectories)


def test_parts_keep_prompt_rollout_and_turn_rewards() -> None:
    own = dataclasses.replace(
        part(2, 1, reward=1.0),
        prompt_tokens=np.array([7, 8], np.int32),
        turn_rewards=(TurnReward(start=0, reward=0.5),),
    )
    made = decode(encode(grouped(part(0), part(2, reward=1.0), own)), TrajectoryGroup)
    assert [[one.part for one in parts] for parts in made.rollouts] == [[0], [0, 1]]
    assert made.rewards == [0.0, 1.0]
    last = made.trajectories[-1]
    assert made.prompt_of(last).tolist() == [7, 8]
    assert made.prompt_of(made.trajectories[0]).tolist() == [1, 2]
    assert last.turn_rewards == (TurnReward(start=0, reward=0.5),)


@pytest.mark.parametrize(
    ("trajectories", "problem"),
    [
        ((part(0, reward=1.0), part(0, 1, reward=0.0)), "rollout 0 has different rewards in its parts"),
        ((part(0, reward=1.0), part(0, 1, reward=math.nan)), "rollout 0 has different rewards in its parts"),
        ((part(1), part(0)), "must be sorted by rollout and part"),
        ((part(0), part(0)), "must be sorted by rollout and part"),
        ((trajectory(), part(0)), "does not say which rollout it is a part of"),
        ((part(-1, 0), part(-1, 1)), "does not say which rollout it is a part of"),
    ],
)
def test_inconsistent_parts_are_refused(trajectories: tuple[Trajectory, ...], problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        grouped(*trajectories)


@pytest.mark.parametrize("starts", [(1, 0), (0, 0), (5,)])
def test_turn_rewards_are_at_sampled_tokens_in_order(starts: tuple[int, ...]) -> None:
    with pytest.raises(MessageError, match="turn_rewards must start at tokens that the policy sampled"):
        dataclasses.replace(trajectory(), turn_rewards=tuple(TurnReward(start=at, reward=1.0) for at in starts))
