"""Promises of filters, reward shaping, and reductions per sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies import filters
from asyncrl.policies.segments import segment_count, segment_max, segment_mean, segment_sum, spread


def group(*rewards: float) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, bool),
            behavior_logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=0),),
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
    # 100 tokens allowed, the last 20 of them cost 0 to 1.
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


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_reductions_are_those_of_each_sequence_alone(lengths: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=sum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    rows = [values[sequence == i] for i in range(len(lengths))]
    size = {"num_sequences": len(lengths)}
    np.testing.assert_allclose(segment_sum(values, sequence, **size), [row.sum() for row in rows], atol=1e-12)
    np.testing.assert_allclose(segment_mean(values, sequence, **size), [row.mean() if len(row) else 0 for row in rows])
    np.testing.assert_allclose(segment_max(values, sequence, **size), [row.max(initial=-np.inf) for row in rows])
    assert segment_count(sequence, **size).tolist() == lengths
    assert spread(torch.arange(len(lengths)), sequence).tolist() == sequence.tolist()


def test_gradients_flow_through_sums_and_means() -> None:
    values = torch.ones(3, requires_grad=True)
    index = torch.tensor([0, 0, 2])
    (segment_mean(values, index, num_sequences=3) * torch.tensor([2.0, 5.0, 7.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 7.0]
