"""staleness.discard = "tokens": a token that is too old stays as context untrained; all others are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.backends.micro_batches import PackedRow, response_rows
from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.policies.advantages.returns import GAE, Returns
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch, model_outputs
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import TrainingSequence, pack_for_ranks
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.losses.aggregation import AGGREGATIONS
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.ppo import GSPO
from asyncrl.policies.staleness.staleness import per_token
from tests.harness.groups import span, trajectory

AT, BOUND = 9, 2
GRPO = resolve(ALGORITHMS["grpo"])


def sampled_by(*versions: int, reward: float = 0.0, **changes: Any) -> Trajectory:
    """A trajectory with one token of each version."""
    spans = tuple(span(version, start=start) for start, version in enumerate(versions))
    made = trajectory(length=len(versions), reward=reward)
    return dataclasses.replace(made, version_spans=spans, **changes)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=0, prompt_tokens=np.array([1, 2], np.int32), trajectories=trajectories)


LATE = group(sampled_by(3, 6, 7, 9, reward=1.0), sampled_by(8, 9))
"""With a bound of 2, step 10 (from version 9) leaves out the first two tokens of the first answer."""


def build(*groups: TrajectoryGroup, algorithm: Algorithm = GRPO, bound: int = BOUND, discard: Any = "tokens") -> Batch:
    return batch.build(
        groups, algorithm=algorithm, policy_version=AT, max_staleness=bound, resume_points={}, discard=discard
    )


def behind_prompt(made: TrainingSequence) -> list[int]:
    """Return the trained positions of the response."""
    return np.flatnonzero(made.response_mask[2:]).tolist()


def test_only_what_is_over_the_bound_is_left_out_and_everything_counts_in_the_baseline() -> None:
    made = build(LATE)
    assert [behind_prompt(sequence) for sequence in made.sequences] == [[2, 3], [0, 1]]
    late, other = made.sequences
    assert late.tokens.tolist() == [1, 2, *LATE.trajectories[0].tokens]  # old tokens stay as context
    assert (late.advantages[2:] > 0).tolist() == [False, False, True, True]
    assert (other.advantages[2:] < 0).all()
    assert made.metrics["staleness/max"] == made.max_staleness == BOUND
    assert made.metrics["staleness/old_tokens"] == made.old_tokens == 2
    assert made.metrics["length/trained_tokens"] == made.num_tokens == 4
    assert made.metrics["staleness/histogram"].counts == (2, 1, 1)  # type: ignore[union-attr]
    assert made.metrics["reward/mean"] == 0.5
    assert "staleness/old_trajectories" not in made.metrics
    assert build(LATE, discard="trajectories").metrics["staleness/old_trajectories"] == 1


def test_with_all_tokens_within_the_bound_it_is_the_batch_that_it_would_be_anyway() -> None:
    for mine, other in zip(
        build(LATE, bound=6).sequences, build(LATE, bound=6, discard="groups").sequences, strict=True
    ):
        for field in dataclasses.fields(TrainingSequence):
            np.testing.assert_array_equal(getattr(mine, field.name), getattr(other, field.name), err_msg=field.name)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_no_token_counts_more_because_another_was_left_out(name: str) -> None:
    """Otherwise the last tokens of a slow answer would count for the whole answer."""
    algorithm = dataclasses.replace(GRPO, aggregation=AGGREGATIONS[name]())
    left, whole = (build(LATE, algorithm=algorithm, bound=bound).sequences for bound in (BOUND, 6))
    for mine, other in zip(left, whole, strict=True):
        np.testing.assert_array_equal(mine.loss_weights, other.loss_weights * mine.response_mask)


def test_returns_and_values_go_on_through_what_is_left_out() -> None:
    """Left-out tokens still count in the returns of earlier tokens, here tokens of an older history."""
    made = group(sampled_by(8, 3, 9, reward=1.0), sampled_by(9, 9))
    left, whole = (build(made, bound=bound).advantage_inputs for bound in (BOUND, 6))
    assert left.is_trained is not None
    assert left.is_trained.tolist() == [True, False, True, True, True]
    critic = {"values": np.array([0.5, -1.0, 2.0, 0.0, 0.25]), "final_values": np.zeros(2)}
    for advantage in (Returns(gamma=0.5), GAE(gamma=0.5, lam=0.5, whitening="none", truncated="bootstrap")):
        one, other = (advantage.with_returns(dataclasses.replace(of, **critic)) for of in (left, whole))
        np.testing.assert_array_equal(one[0], other[0])
    whitened = GAE()(dataclasses.replace(left, **critic))[left.is_trained]
    assert whitened.mean() == pytest.approx(0, abs=1e-6)  # over the trained tokens only


def test_a_penalty_in_the_reward_knows_what_sampled_the_tokens_that_are_left_out() -> None:
    kl = Penalty(coef=1.0, estimate="k3_weighted", place="reward")
    algorithm = dataclasses.replace(GRPO, advantage=Returns(), kl=kl)
    made = group(sampled_by(8, 3, 9), sampled_by(9, 9))
    found = []
    for bound in (BOUND, 6):
        one = build(made, algorithm=algorithm, bound=bound)
        shares = pack_for_ranks(one.sequences, ranks=1, max_tokens=100)
        outputs = {
            name: [[np.full(micro.num_tokens, value, np.float32) for micro in share] for share in shares]
            for name, value in (("prox_logprobs", -0.7), ("ref_logprobs", -1.5))
        }
        ((micro,),) = model_outputs.complete(shares, outputs, batch=one, algorithm=algorithm)
        found.append(micro)
    left, whole = found
    np.testing.assert_array_equal(left.advantages, whole.advantages * left.response_mask)


def test_a_sequence_s_ratio_is_that_of_its_trained_tokens_given_what_is_before_them() -> None:
    """Left-out tokens are like a prompt for the rest: GSPO treats the tail of a late answer like that tail alone."""
    algorithm = dataclasses.replace(GRPO, advantage=Returns())
    strange = np.array([-9.0, -0.1, -0.5, -0.6], np.float32)
    late = group(sampled_by(3, 6, 7, 9, reward=1.0, behavior_logprobs=strange))
    tail = group(sampled_by(7, 9, reward=1.0, behavior_logprobs=strange[2:]))
    losses = []
    for one in (late, tail):
        ((micro,),) = pack_for_ranks(build(one, algorithm=algorithm).sequences, ranks=1, max_tokens=100)
        row = PackedRow.from_micro_batch(micro, response_rows(micro), device=torch.device("cpu"), in_rectangles=False)
        inputs = row.loss_inputs(torch.tensor([-0.4, -0.9]), torch.zeros(2))
        loss, _ = GSPO(anchor="behavior")(inputs)
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])


def test_each_part_of_a_rollout_loses_its_own_old_tokens() -> None:
    first, second = sampled_by(3, 8, reward=1.0, rollout=0, part=0), sampled_by(9, reward=1.0, rollout=0, part=1)
    other = sampled_by(9, 9, rollout=1, part=0)
    made = build(group(first, second, other))
    assert [behind_prompt(sequence) for sequence in made.sequences] == [[1], [0], [0, 1]]
    assert made.metrics["reward/mean"] == 0.5 and made.metrics["length/trained_mean"] == 2.5
    assert [float(sequence.advantages[-1]) > 0 for sequence in made.sequences] == [True, True, False]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_split_among_ranks_trains_the_same_tokens(ranks: int) -> None:
    made = build(LATE, dataclasses.replace(LATE, group_id=1))
    trained = set()
    for share in pack_for_ranks(made.sequences, ranks=ranks, max_tokens=6):
        for micro in share:
            owner = np.repeat(micro.sequences, np.diff(micro.boundaries))
            trained |= set(zip(owner[micro.response_mask], micro.positions[micro.response_mask], strict=True))
    assert trained == {(0, 4), (0, 5), (1, 2), (1, 3), (2, 4), (2, 5), (3, 2), (3, 3)}


versions = st.tuples(st.integers(0, 1), st.integers(0, 9))
answers = st.lists(st.tuples(versions, st.booleans()), min_size=1, max_size=6).map(
    lambda tokens: [*tokens, (tokens[-1][0], True)]  # every answer has a sampled token
)


@given(
    given_groups=st.lists(st.lists(answers, min_size=1, max_size=3), min_size=1, max_size=4),
    step=st.integers(0, 9),
    bound=st.integers(0, 5),
    resumed_from=st.integers(0, 9),
)
def test_no_token_over_the_bound_is_trained_and_none_within_it_is_lost(
    given_groups: list[list[list[tuple[tuple[int, int], bool]]]], step: int, bound: int, resumed_from: int
) -> None:
    """For any versions, including those of a history that the learner lost when it fell back to ``resumed_from``."""
    resume_points = {1: resumed_from}
    made = GroupTable(step=step, resume_points=resume_points)
    groups = [group_of(number, of) for number, of in enumerate(given_groups)]
    for number, one in enumerate(groups):
        made.publish(number, position=number)
        made.arrive(number + 1, one, now=0.0)
    rule = Selection(max_staleness=bound, discard="tokens")
    stale = rule.stale(made)
    young = {one.group_id: [within(t, step, resume_points, bound) for t in one.trajectories] for one in groups}
    assert {one.group_id for one in stale} == {i for i, masks in young.items() if not any(map(np.any, masks))}
    made.drop(stale)
    kept = [one.group for one in made.buffered.values()]
    if not kept:
        return
    built = batch.build(
        kept, algorithm=GRPO, policy_version=step, max_staleness=bound, resume_points=resume_points, discard="tokens"
    )
    expected = [mask for one in kept for mask in young[one.group_id]]
    assert [sequence.response_mask[2:].tolist() for sequence in built.sequences] == [m.tolist() for m in expected]
    sampled = sum(int(t.response_mask.sum()) for one in kept for t in one.trajectories)
    assert built.old_tokens == sampled - sum(int(mask.sum()) for mask in expected)
    assert built.max_staleness <= bound


def group_of(number: int, of: Sequence[Sequence[tuple[tuple[int, int], bool]]]) -> TrajectoryGroup:
    """Each token of each answer is given as (incarnation, version), and whether the policy sampled it."""
    made = [
        dataclasses.replace(
            trajectory(length=len(tokens)),
            response_mask=np.array([is_sampled for _, is_sampled in tokens]),
            version_spans=tuple(span(version, start, epoch) for start, ((epoch, version), _) in enumerate(tokens)),
        )
        for tokens in of
    ]
    return dataclasses.replace(group(*made), group_id=number)


def within(one: Trajectory, step: int, resume_points: dict[int, int], bound: int) -> Any:
    ages = per_token(one.version_spans, length=len(one.tokens), policy_version=step, resume_points=resume_points)
    return one.response_mask & (ages <= bound)
