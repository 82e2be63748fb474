"""A batch: what it carries, which groups are filtered, and how sequences are packed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch, filters
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, cost, pack_for_ranks
from tests.harness.groups import group
from tests.harness.packing import pack


def test_a_batch_carries_prompt_zeros_and_the_staleness_of_every_token() -> None:
    made = batch.build(
        [group(0, version=3), group(1, version=5)],
        algorithm=resolve(ALGORITHMS["grpo"]),
        policy_version=5,
        max_staleness=4,
        resume_points={},
    )
    first = made.sequences[0]
    assert first.response_mask.tolist() == [False, False, True, True, True]
    assert first.staleness.tolist() == [0, 0, 2, 2, 2]
    assert first.advantages[0] == 0
    assert first.advantages[2] < 0
    assert made.metrics["staleness/mean"] == 1.0
    assert made.metrics["staleness/histogram"].counts == (6, 0, 6, 0, 0)
    assert made.metrics["reward/mean"] == 0.5
    assert sum(float(d.loss_weights.sum()) for d in made.sequences) == pytest.approx(1.0)


def test_a_token_over_the_bound_is_never_trained() -> None:
    with pytest.raises(AssertionError, match="stale"):
        batch.build(
            [group(0, version=0)],
            algorithm=resolve(ALGORITHMS["grpo"]),
            policy_version=5,
            max_staleness=4,
            resume_points={},
        )


def test_a_truncated_answer_that_is_masked_is_in_no_sequence_s_mask() -> None:
    """So its tokens count in no mean; its reward still counts in its group's baseline."""
    algorithm = dataclasses.replace(resolve(ALGORITHMS["grpo"]), masks_truncated=True)
    made = group(0, version=5)
    first, *others = made.trajectories
    cut = dataclasses.replace(made, trajectories=(dataclasses.replace(first, finish_reason="length"), *others))
    sequences = batch.build([cut], algorithm=algorithm, policy_version=5, max_staleness=4, resume_points={}).sequences
    assert not sequences[0].response_mask.any()
    assert not sequences[0].loss_weights.any()
    assert sequences[1].response_mask.any()


def rewarded(*rewards: float) -> TrajectoryGroup:
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


def test_categories_are_shares_of_all_answers_and_solved_ones_have_lengths_of_their_own() -> None:
    made = group(0, version=5)  # rewards 0 and 1, or more of them
    kinds = [{"category/no box": 1.0}, {"judge.category/no box": 1.0, "style": 0.5}]
    trajectories = [
        dataclasses.replace(made.trajectories[0], reward=reward, reward_parts=parts)
        for reward, parts in zip((0.0, 1.0, 0.5, 0.0), (*kinds, {}, {"category/late": 1.0}), strict=True)
    ]
    of_two = {name: getattr(trajectories[1], name)[:2] for name in ("tokens", "response_mask", "behavior_logprobs")}
    trajectories[1] = dataclasses.replace(trajectories[1], **of_two)
    metrics = build(dataclasses.replace(made, trajectories=tuple(trajectories))).metrics
    assert [metrics[f"reward/{name}"] for name in ("category/no box", "judge.category/no box", "style")] == [
        *(0.25, 0.25, 0.5),
    ]
    assert metrics["length/solved_mean"] == metrics["length/solved_max"] == 2
    unsolved = dataclasses.replace(made, trajectories=(trajectories[0], trajectories[2]))
    assert not {"length/solved_mean", "length/solved_max"} & build(unsolved).metrics.keys()


def build(made: TrajectoryGroup) -> batch.Batch:
    return batch.build(
        [made], algorithm=resolve(ALGORITHMS["grpo"]), policy_version=5, max_staleness=4, resume_points={}
    )


def test_a_group_whose_rewards_are_equal_is_filtered() -> None:
    assert filters.dynamic_sampling(rewarded(1.0, 0.0, 0.0))
    for equal in ((1.0, 1.0), (0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (0.5,)):
        assert not filters.dynamic_sampling(rewarded(*equal))


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


def sequence(length: int, fill: int = 1) -> TrainingSequence:
    return TrainingSequence(
        tokens=np.full(length, fill, np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        loss_weights=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4), st.integers(10, 60))
def test_packing_keeps_every_sequence_once_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    shares = pack_for_ranks([sequence(n, fill=i + 1) for i, n in enumerate(lengths)], ranks=ranks, max_tokens=budget)
    assert len({len(share) for share in shares}) == 1
    counts = np.zeros(len(lengths) + 1, int)
    for micro_batch in (m for share in shares for m in share):
        sizes = np.diff(micro_batch.boundaries)
        assert micro_batch.num_tokens <= budget or len(sizes) == 1
        counts += np.bincount(micro_batch.tokens, minlength=len(counts))
    assert counts[1:].tolist() == lengths


def sizes(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [np.diff(micro_batch.boundaries).tolist() for micro_batch in micro_batches]


def test_micro_batches_are_filled_evenly() -> None:
    """14 tokens in rows of at most 10 make two rows of 8 and 6; filling one row first would make 10 and 4."""
    assert sizes(pack([sequence(n) for n in (4, 4, 2, 4)], max_tokens=10)) == [[4, 4], [4, 2]]


def test_no_more_micro_batches_than_filling_one_after_the_other_needs() -> None:
    """Dealt evenly into rows of 6, they would be 3 2 | 3 2, with no room for the last 2."""
    assert sizes(pack([sequence(n) for n in (3, 3, 2, 2, 2)], max_tokens=6)) == [[3, 3], [2, 2, 2]]


def test_ranks_share_the_cost_and_not_the_tokens() -> None:
    """A sequence of 16384 tokens costs 32768, about as much as short sequences of 32 x 992 tokens in total."""
    batch = [sequence(16_384), *(sequence(496) for _ in range(64))]
    shares = pack_for_ranks(batch, ranks=2, max_tokens=40_000)
    (long,), (short,) = shares
    assert long.num_tokens < 18_000
    assert short.num_tokens > 30_000
    totals = [sum(cost(n) for n in sizes(share)[0]) for share in shares]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)


def test_positions_start_anew_in_every_sequence() -> None:
    (micro_batch,) = pack([sequence(3), sequence(2)], max_tokens=10)
    assert micro_batch.positions.tolist() == [0, 1, 2, 0, 1]


def test_only_sequences_sampled_wholly_by_the_trained_version_are_fresh() -> None:
    mixed = dataclasses.replace(sequence(3), staleness=np.array([1, 1, 0], np.int32))
    (micro_batch,) = pack([sequence(2), mixed], max_tokens=10)
    assert micro_batch.is_fresh.tolist() == [True, True, False, False, False]
