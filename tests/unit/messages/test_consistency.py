"""Messages that contradict themselves are refused: trajectories, parts of rollouts, experts of tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.engines.generation import NOTHING, Generation
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import MessageError
from asyncrl.messages import (
    Event,
    Trajectory,
    TrajectoryGroup,
    TurnReward,
    VersionSpan,
    Wait,
    replace,
)
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.routing import NO_EXPERTS, join
from tests.harness.groups import trajectory
from tests.unit.messages.test_messages import SPANS, TRAJECTORY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [], "response_mask": [], "behavior_logprobs": []}, "no tokens"),
        ({"response_mask": [True]}, "response_mask has 1 of 3"),
        ({"behavior_logprobs": [-1.0]}, "behavior_logprobs has 1 of 3"),
        ({"behavior_logprobs": [-1.0, math.nan, 0.0]}, "NaN"),
        ({"behavior_logprobs": [-1.0, -math.inf, 0.0]}, "infinity"),
        ({"behavior_logprobs": [-1.0, 0.5, 0.0]}, "above 0"),
        ({"version_spans": ()}, "version_spans"),
        ({"version_spans": (VersionSpan(start=1, incarnation=0, policy_version=0),)}, "start at 0"),
        ({"version_spans": (SPANS[0], VersionSpan(start=3, incarnation=0, policy_version=9))}, "below 3"),
        ({"version_spans": (SPANS[0], SPANS[0])}, "rise"),
        ({"finish_reason": "tired"}, "tired"),
        ({"tokens": np.zeros(3, np.int64)}, "tokens must have one dimension of int32"),
        ({"tokens": np.zeros((3, 1), np.int32)}, "one dimension"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        replace(TRAJECTORY, **changes)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_implausible_seconds_are_refused(seconds: float) -> None:
    """Computing with such seconds or showing them would give numbers that JSON or a viewer cannot represent."""
    for make in (
        lambda: Event(kind="joined", actor="w0", time=seconds),
        lambda: Wait(what="prompts", seconds=seconds),
        lambda: Wait(what="prompts", usual=seconds),
        lambda: Wait(what="prompts", limit=seconds),
    ):
        with pytest.raises(MessageError, match="must be seconds"):
            make()


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


NONE = 255
PROMPT = np.array([9, 8], np.int32)


def experts(*numbers: int) -> NDArray[Any]:
    """One layer, one expert per token."""
    return np.array(numbers, np.uint8).reshape(-1, 1, 1)


def answer(tokens: int, *numbers: int, finish_reason: str = "stop") -> Generation:
    return Generation(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        finish_reason=finish_reason,
        experts=experts(*numbers),
    )


def numbers(found: NDArray[Any]) -> list[int]:
    return found[:, 0, 0].tolist()


def test_a_token_keeps_the_experts_with_which_the_next_one_was_sampled() -> None:
    """Prompt of 2, then 2 tokens, then 2 more from an engine that recomputed all previous tokens with other experts."""
    before, rest = experts(1, 2, 3, NONE), experts(5, 5, 5, 6, 7, NONE)
    assert numbers(join(before, rest, 2)) == [1, 2, 3, 6, 7, NONE]


def test_tokens_without_reported_experts_are_unrouted() -> None:
    assert numbers(join(experts(1, 2, NONE), NO_EXPERTS, 2)) == [1, 2, NONE, NONE, NONE]
    assert numbers(join(NO_EXPERTS, experts(1, NONE), 1)) == [1, NONE]


@pytest.mark.parametrize("cut", range(5))
def test_joining_two_halves_of_an_answer_gives_its_experts(cut: int) -> None:
    whole = answer(4, 1, 2, 3, 4, 5, NONE)
    again = whole.first(cut).then(whole.after(cut))
    assert (numbers(again.experts), again.tokens.tolist()) == ([1, 2, 3, 4, 5, NONE], [0, 1, 2, 3])
    assert numbers(NOTHING.then(whole).experts) == numbers(whole.experts)


def test_observations_between_turns_are_unrouted() -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer(2, 1, 2, 3, NONE))
    turns.add_observation([7])
    turns.add_answer(answer(1, 6, 6, 6, 4, 5, NONE))
    assert numbers(turns.trajectory().experts) == [1, 2, 3, 4, 5, NONE]


def routed(found: NDArray[Any]) -> Trajectory:
    return Trajectory(
        tokens=np.array([3, 4], np.int32),
        response_mask=np.ones(2, np.bool_),
        behavior_logprobs=np.full(2, -1.0, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        experts=found,
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_round_trip(dtype: Any) -> None:
    found = np.arange(16, dtype=dtype).reshape(4, 2, 2)
    group = TrajectoryGroup(group_id=0, prompt_tokens=PROMPT, trajectories=(routed(found),))
    (again,) = decode(encode(group), TrajectoryGroup).trajectories
    assert again.experts.dtype == dtype
    np.testing.assert_array_equal(again.experts, found)


@pytest.mark.parametrize("wrong", [experts(1), experts(1, 2, 3)[:, 0], experts(1, 2, 3).astype(np.int32)])
def test_experts_of_wrong_shape_or_type_are_refused(wrong: NDArray[Any]) -> None:
    with pytest.raises(MessageError, match="experts"):
        routed(wrong)
