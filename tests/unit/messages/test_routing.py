"""Experts stay with their tokens, however a text was assembled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.engines.generation import NOTHING, Generation
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import MessageError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.routing import NO_EXPERTS, join

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
    turns.answered(answer(2, 1, 2, 3, NONE))
    turns.observed([7])
    turns.answered(answer(1, 6, 6, 6, 4, 5, NONE))
    assert numbers(turns.trajectory().experts) == [1, 2, 3, 4, 5, NONE]


def trajectory(found: NDArray[Any]) -> Trajectory:
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
    group = TrajectoryGroup(group_id=0, prompt_tokens=PROMPT, trajectories=(trajectory(found),))
    (again,) = decode(encode(group), TrajectoryGroup).trajectories
    assert again.experts.dtype == dtype
    np.testing.assert_array_equal(again.experts, found)


@pytest.mark.parametrize("wrong", [experts(1), experts(1, 2, 3)[:, 0], experts(1, 2, 3).astype(np.int32)])
def test_experts_of_wrong_shape_or_type_are_refused(wrong: NDArray[Any]) -> None:
    with pytest.raises(MessageError, match="experts"):
        trajectory(wrong)
