"""Tokens that a worker took over are checked apart from tokens that it sampled itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl.errors import MessageError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.policies.groups.resumed_tokens import split, spoiled


def trajectory(*, resumed: int) -> Trajectory:
    """Two sampled tokens, one observation token, two sampled tokens."""
    return Trajectory(
        tokens=np.arange(5, dtype=np.int32),
        response_mask=np.array([True, True, False, True, True]),
        behavior_logprobs=np.array([-1, -1, 0, -1, -1], np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        resumed=resumed,
    )


def sequence(*, age: int = 0) -> TrainingSequence:
    """A sequence of such a trajectory after a prompt of one token."""
    mask = np.array([False, True, True, False, True, True])
    return TrainingSequence(
        tokens=np.zeros(6, np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
        advantages=np.zeros(6, np.float32),
        loss_weights=np.zeros(6, np.float32),
        staleness=np.where(mask, age, 0).astype(np.int32),
    )


def group(*resumed: int) -> TrajectoryGroup:
    answers = tuple(trajectory(resumed=count) for count in resumed)
    return TrajectoryGroup(group_id=0, prompt_tokens=np.zeros(1, np.int32), trajectories=answers)


def test_the_first_sampled_tokens_are_those_that_were_taken_over() -> None:
    """Three of four are resumed: positions 1, 2 and 4 of the sequence. The worker sampled position 5 itself."""
    own, taken_over = split([sequence(), sequence(), sequence()], [group(0, 3), group(4)])
    assert [np.flatnonzero(one.response_mask).tolist() for one in own] == [[1, 2, 4, 5], [5], []]
    masks = {index: np.flatnonzero(one.response_mask).tolist() for index, one in taken_over.items()}
    assert masks == {1: [1, 2, 4], 2: [1, 2, 4, 5]}


def test_nobody_now_is_accountable_for_a_group_of_an_earlier_incarnation() -> None:
    own, taken_over = split([sequence(), sequence()], [group(0, 3)], inherited={0})
    assert [np.flatnonzero(one.response_mask).tolist() for one in own] == [[], []]
    assert [np.flatnonzero(taken_over[index].response_mask).tolist() for index in (0, 1)] == [[1, 2, 4, 5]] * 2


def test_what_was_taken_over_and_is_left_out_as_too_old_is_checked_too() -> None:
    """Resumed tokens influence the tokens trained after them. The worker's own part is as old as its own tokens."""
    late = sequence(age=1)
    late = dataclasses.replace(late, response_mask=late.response_mask & (np.arange(6) > 4))
    own, taken_over = split([late], [group(3)])
    assert np.flatnonzero(own[0].response_mask).tolist() == [5]
    assert np.flatnonzero(taken_over[0].response_mask).tolist() == [1, 2, 4]
    assert (own[0].staleness.tolist(), taken_over[0].staleness.tolist()) == ([0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 1])
    nothing = dataclasses.replace(late, response_mask=np.zeros(6, np.bool_))
    assert split([nothing], [group(3)])[1] == {}


def test_what_was_taken_over_may_be_off_by_the_bound_for_each_version_that_it_is_old() -> None:
    """1.4 nats off is within 0.5 x (1 + 2), but not within 0.5 x (1 + 1)."""
    own, taken_over = split([sequence(age=1), sequence(age=2)], [group(4, 4)])
    logprobs = {index: np.full(6, -2.4, np.float32) for index in taken_over}
    found = spoiled(taken_over, logprobs, bound=0.5)
    assert found == {
        0: "4 tokens taken over from an earlier attempt are 1.4 nats per token off the trainer's (1 are allowed)"
    }
    assert spoiled(taken_over, {i: np.full(6, np.nan, np.float32) for i in taken_over}, bound=0.5).keys() == {0, 1}


@pytest.mark.parametrize("resumed", [-1, 5])
def test_no_more_can_be_taken_over_than_was_sampled(resumed: int) -> None:
    with pytest.raises(MessageError, match="resumed is"):
        trajectory(resumed=resumed)
