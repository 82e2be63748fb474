"""Filters and reward shaping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.batching import filters


def group(*rewards: float) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, bool),
            behavior_logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
            reward=reward,
        )
        for reward in rewards
    )
    return TrajectoryGroup(group_id=0, prompt_tokens=np.zeros(1, np.int32), trajectories=trajectories)


def test_a_group_whose_rewards_are_equal_is_filtered() -> None:
    assert filters.dynamic_sampling(group(1.0, 0.0, 0.0))
    for equal in ((1.0, 1.0), (0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (0.5,)):
        assert not filters.dynamic_sampling(group(*equal))


def test_a_group_without_rewards_is_filtered() -> None:
    assert not filters.has_spread([])
    assert not filters.has_spread([float("nan"), 1.0])


def test_a_long_answer_is_punished_up_to_the_factor() -> None:
    # 100 tokens are allowed; the penalty grows from 0 to 1 over the last 20.
    lengths = [0, 80, 90, 100, 120]
    np.testing.assert_allclose(filters.overlong_penalty(lengths, max_tokens=100, cache_tokens=20), [0, 0, -0.5, -1, -1])
    np.testing.assert_allclose(
        filters.overlong_penalty(lengths, max_tokens=100, cache_tokens=20, factor=2.0, has_floor=False),
        [0, 0, -1, -2, -4],
    )
    with pytest.raises(ValueError, match="cache_tokens"):
        filters.overlong_penalty(lengths, max_tokens=100, cache_tokens=0)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=10))
def test_a_longer_answer_is_never_punished_less(lengths: list[int]) -> None:
    penalty = filters.overlong_penalty(sorted(lengths), max_tokens=100, cache_tokens=30)
    assert (np.diff(penalty) <= 0).all()
    assert ((penalty >= -1) & (penalty <= 0)).all()


def test_a_truncated_answer_trains_nothing() -> None:
    masks = [np.array([True, False, True])] * 2
    finished, truncated = filters.overlong_masks(masks, ["stop", "length"])
    assert finished.tolist() == [True, False, True]
    assert not truncated.any()
