"""A rollout in several parts has several sequences, but one reward, one baseline, and one place in every mean."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import TrajectoryGroup, TurnReward
from asyncrl.policies.advantages.advantage import AdvantageInputs, GroupAdvantage
from asyncrl.policies.advantages.returns import GAE, Returns
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.advantages.turns import TurnGRPO, turns_of
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.losses.aggregation import AGGREGATIONS
from tests.harness.groups import span, trajectory

OF_ROLLOUTS = {name: kind() for name, kind in ADVANTAGES.items() if issubclass(kind, GroupAdvantage)}


def group_of(rollouts: list[tuple[float, list[int]]]) -> TrajectoryGroup:
    """Make a group from (reward, tokens of each part) of each rollout."""
    made = tuple(
        dataclasses.replace(trajectory(reward=reward, length=length), rollout=number, part=part)
        for number, (reward, lengths) in enumerate(rollouts)
        for part, length in enumerate(lengths)
    )
    return TrajectoryGroup(group_id=0, prompt_tokens=np.array([1, 2], np.int32), trajectories=made)


def built(*groups: TrajectoryGroup, **changes: Any) -> Batch:
    algorithm = dataclasses.replace(resolve(ALGORITHMS["grpo"]), **changes)
    return batch.build(groups, algorithm=algorithm, policy_version=0, max_staleness=0, resume_points={})


def advantages(made: Batch) -> list[float]:
    """Return one advantage per sequence; all tokens of a sequence have the same advantage."""
    return [float(sequence.advantages[-1]) for sequence in made.sequences]


def test_the_winner_in_three_parts_counts_once_in_its_group() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, standard deviation 1/2. Six sequences 1, 1, 1, 0, 0, 0 would give 0.913."""
    made = built(group_of([(1.0, [3, 3, 3]), (0.0, [3]), (0.0, [3]), (0.0, [3])]))
    assert advantages(made) == pytest.approx([1.5, 1.5, 1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert made.metrics["reward/mean"] == 0.25
    assert made.metrics["length/trained_mean"] == (9 + 3 + 3 + 3) / 4
    assert made.metrics["length/parts_mean"] == 1.5


def test_a_part_that_is_too_old_trains_nothing_and_its_rollout_counts_all_the_same() -> None:
    """The winner's first part is of version 1, everything else of version 3; version 4 trains with a bound of 2."""
    winner, *others = group_of([(1.0, [3, 4]), (0.0, [3]), (0.0, [3]), (0.0, [3])]).rollouts
    old = dataclasses.replace(winner[0], version_spans=(span(1),))
    young = [dataclasses.replace(one, version_spans=(span(3),)) for one in (winner[1], *(one for (one,) in others))]
    group = dataclasses.replace(group_of([(0.0, [1])]), trajectories=(old, *young))
    build = functools.partial(
        batch.build,
        [group],
        algorithm=resolve(ALGORITHMS["grpo"]),
        policy_version=4,
        max_staleness=2,
        resume_points={},
    )
    with pytest.raises(AssertionError, match="let a stale token through"):
        build()
    made = build(discard="trajectories")
    assert advantages(made) == pytest.approx([0.0, 1.5, -0.5, -0.5, -0.5], abs=1e-5)
    trained = [int(sequence.response_mask.sum()) for sequence in made.sequences]
    assert trained == [0, 4, 3, 3, 3] and made.num_tokens == 13
    assert [float(sequence.loss_weights.sum()) > 0 for sequence in made.sequences] == [False, True, True, True, True]
    assert (made.old_trajectories, made.max_staleness, made.metrics["staleness/max"]) == (1, 1, 1.0)
    assert made.metrics["staleness/old_trajectories"] == 1.0 and made.metrics["reward/mean"] == 0.25


def test_samples_that_failed_are_counted_apart_from_those_that_were_cut_off() -> None:
    two_of_four = dataclasses.replace(group_of([(1.0, [3]), (0.0, [3])]), cancelled=2, failed_samples=1)
    one_of_two = dataclasses.replace(group_of([(1.0, [3])]), group_id=1, cancelled=1)
    made = built(two_of_four, one_of_two)
    assert (made.metrics["staleness/cancelled"], made.metrics["staleness/failed_samples"]) == (3, 1)


rollouts = st.lists(
    st.tuples(st.integers(0, 3).map(float), st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1, max_size=5
)


@given(groups=st.lists(rollouts, min_size=1, max_size=3))
def test_no_arrangement_of_parts_changes_what_a_rollout_counts(
    groups: list[list[tuple[float, list[int]]]],
) -> None:
    """For every advantage over groups and every aggregation, the result is as if each rollout were one sequence."""
    whole = [[(reward, [sum(lengths)]) for reward, lengths in group] for group in groups]
    in_parts, as_one = (built(*map(group_of, made)).advantage_inputs for made in (groups, whole))
    for name, advantage in OF_ROLLOUTS.items():
        np.testing.assert_array_equal(advantage(in_parts), advantage(as_one), err_msg=name)
    for name, kind in AGGREGATIONS.items():
        weights = [
            kind()([np.ones(n, np.bool_) for n in made.lengths], group=made.group, rollout=made.rollout)
            for made in (in_parts, as_one)
        ]
        np.testing.assert_array_equal(*map(np.concatenate, weights), err_msg=name)


@given(rewards=st.lists(st.floats(-2, 2), min_size=1, max_size=6), name=st.sampled_from(sorted(OF_ROLLOUTS)))
def test_rollouts_of_one_part_are_what_answers_were(rewards: list[float], name: str) -> None:
    """Equal to the last bit, whether or not a sequence states its rollout."""
    count = len(rewards)
    inputs = AdvantageInputs(
        rewards=np.array(rewards), group=np.arange(count) // 2, sequence=np.repeat(np.arange(count), 2)
    )
    numbered = dataclasses.replace(inputs, rollout=np.arange(count))
    np.testing.assert_array_equal(OF_ROLLOUTS[name](inputs), OF_ROLLOUTS[name](numbered))


def test_a_part_follows_its_own_prompt() -> None:
    made = group_of([(1.0, [2, 2]), (0.0, [2])])
    first, second, third = made.trajectories
    made = dataclasses.replace(
        made, trajectories=(first, dataclasses.replace(second, prompt_tokens=np.array([7, 8, 9], np.int32)), third)
    )
    sequences = built(made).sequences
    assert [d.tokens.tolist() for d in sequences] == [[1, 2, 4, 5], [7, 8, 9, 4, 5], [1, 2, 4, 5]]
    assert [int(np.flatnonzero(d.response_mask)[0]) for d in sequences] == [2, 3, 2]


def test_every_part_ends_with_the_reward_and_no_part_looks_into_the_next() -> None:
    """gamma 0.5 over parts of two tokens gives 0.5, 1 in each part; GAE with values of 0 gives the same."""
    made = built(group_of([(1.0, [2, 2]), (0.0, [2])])).advantage_inputs
    expected = [0.5, 1.0, 0.5, 1.0, 0.0, 0.0]
    assert Returns(gamma=0.5)(made).tolist() == expected
    critic = dataclasses.replace(made, values=np.zeros(6), final_values=np.full(3, 9.0))
    assert GAE(gamma=0.5, whitening="none", truncated="bootstrap")(critic).tolist() == expected


def test_a_turn_s_reward_is_on_its_last_token() -> None:
    """Turns are 0-1; 4-5 after an observation; and 6, where a reward marks the beginning of a turn."""
    mask = np.array([1, 1, 0, 0, 1, 1, 1], np.bool_)
    turn, earned = turns_of(mask, [TurnReward(start=0, reward=2.0), TurnReward(start=6, reward=3.0)])
    assert turn.tolist() == [0, 0, 1, 1, 2]
    assert earned.tolist() == [0.0, 2.0, 0.0, 0.0, 3.0]


def with_turns(rewards: list[list[list[float]]]) -> TrajectoryGroup:
    """Make rollouts from rewards of one-token turns, per rollout and part; the rollouts' own rewards are 0."""
    made = [
        dataclasses.replace(
            trajectory(length=len(turns)),
            rollout=number,
            part=part,
            turn_rewards=tuple(TurnReward(start=at, reward=value) for at, value in enumerate(turns)),
        )
        for number, parts in enumerate(rewards)
        for part, turns in enumerate(parts)
    ]
    return TrajectoryGroup(group_id=0, prompt_tokens=np.array([1, 2], np.int32), trajectories=tuple(made))


def test_gae_adds_what_turns_earned_to_the_return_of_their_part_alone() -> None:
    made = built(with_turns([[[1.0, 2.0], [4.0]], [[0.0]]])).advantage_inputs
    assert Returns()(made).tolist() == [3.0, 2.0, 4.0, 0.0]
    critic = dataclasses.replace(made, values=np.zeros(4), final_values=np.zeros(3))
    assert GAE(whitening="none")(critic).tolist() == [3.0, 2.0, 4.0, 0.0]


def test_turns_are_compared_with_turns_of_the_same_number() -> None:
    """Turn 0 returns 3 and 1: 2 +- 1, so +-0.7071. Turn 1 returns 2 and 0, with the same result. Turn 2 is alone."""
    made = built(with_turns([[[1.0], [2.0]], [[1.0, 0.0, 0.0]]]), advantage=TurnGRPO())
    tokens = list(itertools.chain.from_iterable(d.advantages[2:].tolist() for d in made.sequences))
    half = 0.5**0.5
    assert tokens == pytest.approx([half, half, -half, -half, 0.0], abs=1e-5)
    as_grpo = group_of([(1.0, [1, 2]), (0.0, [1])])
    assert advantages(built(as_grpo, advantage=TurnGRPO())) == advantages(built(as_grpo))
