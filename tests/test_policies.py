"""Decision rules: numbers worked by hand, properties, and the invariants their files promise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies import advantages, aggregation, batch, corrections, diagnostics, losses
from asyncrl.policies.admission import Admission
from asyncrl.policies.algorithms import LossInputs, resolve
from asyncrl.policies.buffer import Buffer
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.packing import Document, MicroBatch, cost, pack, pack_for_ranks
from asyncrl.policies.rows import ALGORITHMS
from asyncrl.policies.staleness import effective_version, oldest_version, per_token


def span(version: int, start: int = 0, epoch: int = 0) -> VersionSpan:
    return VersionSpan(start=start, run_epoch=epoch, policy_version=version)


def trajectory(*, version: int = 0, length: int = 3, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        tokens=np.arange(4, 4 + length, dtype=np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.full(length, -0.5, np.float32),
        version_spans=(span(version),),
        reward=reward,
    )


def group(
    group_id: int, *, version: int = 0, error: str = "", rewards: tuple[float, ...] = (0.0, 1.0)
) -> TrajectoryGroup:
    made = () if error else tuple(trajectory(version=version, reward=reward) for reward in rewards)
    return TrajectoryGroup(group_id=group_id, prompt_tokens=np.array([1, 2], np.int32), trajectories=made, error=error)


# -- ledger ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40)))
def test_a_ledger_holds_what_was_added_and_survives_json(numbers: list[int]) -> None:
    ledger = Ledger()
    for number in numbers:
        ledger.add(number)
    again = Ledger.from_json(ledger.as_json())
    assert {n for n in range(50) if n in again} == set(numbers)
    assert len(again) == len(set(numbers))
    assert again.watermark not in again.beyond


def test_a_ledger_of_contiguous_numbers_is_one_number() -> None:
    ledger = Ledger()
    for number in (2, 0, 1):
        assert ledger.add(number)
    assert ledger.as_json() == {"watermark": 3, "beyond": []}
    assert not ledger.add(1)


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_staleness_is_counted_per_token() -> None:
    ages = per_token((span(3), span(5, start=2)), length=4, policy_version=6, forks={})
    assert ages.tolist() == [3, 3, 1, 1]


def test_versions_of_a_lost_history_count_as_old_as_the_fork() -> None:
    # Epoch 0 reached version 9, then the learner fell back to a checkpoint at 6 and started epoch 1 from there.
    forks = {1: 6}
    assert effective_version(span(9, epoch=0), forks) == 6
    assert effective_version(span(4, epoch=0), forks) == 4
    assert effective_version(span(9, epoch=1), forks) == 9
    assert oldest_version((span(9, epoch=0), span(8, start=2, epoch=1)), forks) == 6


def test_a_second_fall_back_counts_from_the_earlier_fork() -> None:
    assert effective_version(span(9, epoch=0), {1: 6, 2: 3}) == 3


# -- admission ---------------------------------------------------------------------------------------------------------


def admission(mode: str, *, max_staleness: int = 2) -> Admission:
    return Admission(mode=mode, groups_per_batch=4, max_staleness=max_staleness, total_groups=1000)


def test_the_window_is_max_staleness_plus_one_batches() -> None:
    rule = admission("async")
    assert rule.may_publish(published=0, lost=0, batches_taken=0, steps_done=0) == 12
    assert rule.may_publish(published=12, lost=0, batches_taken=1, steps_done=0) == 0
    assert rule.may_publish(published=12, lost=0, batches_taken=1, steps_done=1) == 4


def test_a_lost_group_frees_its_place() -> None:
    assert admission("async").may_publish(published=12, lost=3, batches_taken=0, steps_done=0) == 3


def test_sync_publishes_the_next_batch_only_after_the_step() -> None:
    rule = admission("sync")
    assert rule.may_publish(published=4, lost=0, batches_taken=1, steps_done=0) == 0
    assert rule.may_publish(published=4, lost=0, batches_taken=1, steps_done=1) == 4


def test_one_step_off_generates_the_next_batch_while_one_is_trained() -> None:
    rule = admission("one_step_off")
    assert rule.may_publish(published=4, lost=0, batches_taken=0, steps_done=0) == 0
    assert rule.may_publish(published=4, lost=0, batches_taken=1, steps_done=0) == 4


def test_async_without_staleness_admits_what_sync_admits() -> None:
    zero, sync = admission("async", max_staleness=0), admission("sync")
    for done in range(5):
        for published in range(4 * done, 4 * done + 5):
            state = {"published": published, "lost": 0, "batches_taken": done, "steps_done": done}
            assert zero.may_publish(**state) == sync.may_publish(**state)


def test_no_group_is_published_that_the_run_will_not_train() -> None:
    rule = Admission(mode="async", groups_per_batch=4, max_staleness=8, total_groups=8)
    assert rule.may_publish(published=6, lost=0, batches_taken=0, steps_done=0) == 2


# -- buffer ------------------------------------------------------------------------------------------------------------


def test_a_group_delivered_twice_is_held_once() -> None:
    buffer = Buffer(max_staleness=4)
    assert buffer.add(1, group(0), now=0.0) == "held"
    assert buffer.add(2, group(0), now=0.0) == "duplicate"
    (held,) = buffer.take(1) or []
    buffer.dispose(held)
    assert buffer.add(3, group(0), now=0.0) == "duplicate"
    assert buffer.consumed.as_json() == {"watermark": 4, "beyond": []}


def test_the_oldest_groups_are_taken_first_whatever_their_arrival() -> None:
    buffer = Buffer(max_staleness=4)
    for sequence, (group_id, version) in enumerate([(3, 1), (2, 1), (1, 2), (0, 2)], start=1):
        buffer.add(sequence, group(group_id, version=version), now=0.0)
    taken = buffer.take(3) or []
    assert [held.group.group_id for held in taken] == [2, 3, 0]


def test_nothing_too_stale_is_trained() -> None:
    buffer = Buffer(max_staleness=2)
    buffer.add(1, group(0, version=1), now=0.0)
    buffer.add(2, group(1, version=2), now=0.0)
    assert [held.group.group_id for held in buffer.evict(4)] == [0]
    assert [held.group.group_id for held in buffer.take(1) or []] == [1]


def test_taking_is_not_disposing() -> None:
    buffer = Buffer(max_staleness=2)
    buffer.add(1, group(0), now=0.0)
    buffer.take(1)
    assert 0 in buffer.held
    assert 1 not in buffer.consumed


def test_a_buried_group_is_done_with_at_once() -> None:
    buffer = Buffer(max_staleness=2)
    assert buffer.add(1, group(0, error="reward raised"), now=0.0) == "buried"
    assert 0 in buffer.groups


# -- advantages, aggregation, losses, corrections ----------------------------------------------------------------------


def test_grpo_advantages_are_standardised_rewards() -> None:
    # mean 0.5, unbiased std of (0, 1) = sqrt(0.5)
    np.testing.assert_allclose(advantages.grpo([0.0, 1.0]), [-0.70710579, 0.70710579], rtol=1e-5)


def test_equal_rewards_and_single_samples_have_no_advantage() -> None:
    assert advantages.grpo([0.3, 0.3, 0.3]).tolist() == [0, 0, 0]
    assert advantages.grpo([0.7]).tolist() == [0]


def test_token_mean_weights_every_response_token_of_the_batch_alike() -> None:
    weights = aggregation.token_mean([np.array([True, False, True]), np.array([True, True])])
    assert [w.tolist() for w in weights] == [[0.25, 0, 0.25], [0.25, 0.25]]


def test_ppo_clip_stops_the_gradient_only_where_it_would_go_further() -> None:
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = losses.ppo_clip(logprobs, torch.zeros(4), advantage)
    # -1.2 (clipped at 1 + 0.2), 1.5, -0.5, 0.8 (clipped at 1 - 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clipped.tolist() == [True, False, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5, -0.5, 0.0]))


def test_token_tis_truncates_the_ratio_and_carries_no_gradient() -> None:
    log_ratio = torch.log(torch.tensor([0.5, 1.0, 8.0])).requires_grad_()
    weights = corrections.tis_token(log_ratio)
    torch.testing.assert_close(weights, torch.tensor([0.5, 1.0, 2.0]))
    assert not weights.requires_grad


def test_an_infinite_ratio_does_not_make_nan() -> None:
    log_ratio = torch.tensor([float("inf"), float("-inf")])
    assert torch.isfinite(corrections.ratio(log_ratio)).all()


def inputs(logprobs: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor) -> LossInputs:
    return LossInputs(
        staleness=torch.zeros(len(behavior), dtype=torch.int32),
        sequence=torch.zeros(len(behavior), dtype=torch.int64),
        num_sequences=1,
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
        behavior_logprobs=behavior,
        advantages=advantage,
        loss_weights=torch.full_like(logprobs, 1 / len(logprobs)),
        is_fresh=torch.ones(len(logprobs), dtype=torch.bool),
    )


def test_the_grpo_gradient_is_the_truncated_importance_weighted_policy_gradient() -> None:
    # One step per batch: r = 1, so d loss / d logprob = -A * min(ratio, 2) / tokens.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior = torch.tensor([-1.5, -4.0])
    advantage = torch.tensor([1.0, -0.5])
    total, _ = resolve(ALGORITHMS["grpo"]).objective(inputs(logprobs, behavior, advantage))
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-np.exp(0.5) / 2, 0.5 * 2.0 / 2], dtype=torch.float32))


def test_an_unknown_option_or_correction_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no option 'clip'"):
        resolve(ALGORITHMS["grpo"], options={"clip": 0.1})
    with pytest.raises(ConfigError, match="correction must be one of"):
        resolve(ALGORITHMS["grpo"], correction="tis")
    assert resolve(ALGORITHMS["grpo"], options={"cap": 5}).correction[0].options == {"cap": 5.0}


def test_diagnostics_add_up_over_any_split() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.randn(10, generator=generator) for name in ("log_ratio", "entropy")}
    columns |= {"weights": torch.rand(10, generator=generator), "clipped": torch.rand(10, generator=generator) > 0.5}
    columns |= {"is_fresh": torch.arange(10) % 2 == 0}

    def part(rows: slice) -> diagnostics.Sums:
        return diagnostics.token_sums(**{k: v[rows] for k, v in columns.items()}, loss=torch.tensor(1.0))

    whole = part(slice(0, 10))
    split = part(slice(0, 3)) + part(slice(3, 10))
    torch.testing.assert_close(whole.sums[1:], split.sums[1:])
    torch.testing.assert_close(whole.maxima, split.maxima)
    assert diagnostics.metrics(whole)["offpolicy/ess"] <= 1.0


# -- packing and batches -----------------------------------------------------------------------------------------------


def document(length: int, fill: int = 1) -> Document:
    return Document(
        tokens=np.full(length, fill, np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        loss_weights=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4), st.integers(10, 60))
def test_packing_keeps_every_document_once_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    shares = pack_for_ranks([document(n, fill=i + 1) for i, n in enumerate(lengths)], ranks=ranks, max_tokens=budget)
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
    """14 tokens in rows of at most 10: two rows, 8 and 6, where filling one first would make 10 and 4."""
    assert sizes(pack([document(n) for n in (4, 4, 2, 4)], max_tokens=10)) == [[4, 4], [4, 2]]


def test_no_more_micro_batches_than_filling_one_after_the_other_needs() -> None:
    """Dealt evenly into rows of 6 they would be 3 2 | 3 2 and no room for the last 2."""
    assert sizes(pack([document(n) for n in (3, 3, 2, 2, 2)], max_tokens=6)) == [[3, 3], [2, 2, 2]]


def test_ranks_share_the_cost_and_not_the_tokens() -> None:
    """One document of 16384 costs as much as 32768 tokens of short ones: 32 x 992 tokens of short documents."""
    batch = [document(16_384), *(document(496) for _ in range(64))]
    shares = pack_for_ranks(batch, ranks=2, max_tokens=40_000)
    (long,), (short,) = shares
    assert long.num_tokens < 18_000
    assert short.num_tokens > 30_000
    totals = [sum(cost(n) for n in sizes(share)[0]) for share in shares]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)


def test_positions_start_anew_in_every_document() -> None:
    (micro_batch,) = pack([document(3), document(2)], max_tokens=10)
    assert micro_batch.positions.tolist() == [0, 1, 2, 0, 1]


def test_only_documents_sampled_wholly_by_the_trained_version_are_fresh() -> None:
    mixed = dataclasses.replace(document(3), staleness=np.array([1, 1, 0], np.int32))
    (micro_batch,) = pack([document(2), mixed], max_tokens=10)
    assert micro_batch.is_fresh.tolist() == [True, True, False, False, False]


def test_a_batch_carries_prompt_zeros_and_the_staleness_of_every_token() -> None:
    made = batch.build(
        [group(0, version=3), group(1, version=5)],
        algorithm=resolve(ALGORITHMS["grpo"]),
        policy_version=5,
        max_staleness=4,
        forks={},
    )
    first = made.documents[0]
    assert first.response_mask.tolist() == [False, False, True, True, True]
    assert first.staleness.tolist() == [0, 0, 2, 2, 2]
    assert first.advantages[0] == 0
    assert first.advantages[2] < 0
    assert made.metrics["staleness/mean"] == 1.0
    assert made.metrics["staleness/histogram"].counts == (6, 0, 6, 0, 0)
    assert made.metrics["reward/mean"] == 0.5
    assert sum(float(d.loss_weights.sum()) for d in made.documents) == pytest.approx(1.0)


def test_a_token_over_the_bound_is_never_trained() -> None:
    with pytest.raises(AssertionError, match="stale"):
        batch.build(
            [group(0, version=0)], algorithm=resolve(ALGORITHMS["grpo"]), policy_version=5, max_staleness=4, forks={}
        )


def test_a_truncated_answer_that_is_masked_is_in_no_document_s_mask() -> None:
    """So it counts in no mean either; its reward still counts in its group's baseline."""
    algorithm = dataclasses.replace(resolve(ALGORITHMS["grpo"]), masks_truncated=True)
    made = group(0, version=5)
    first, *others = made.trajectories
    cut = dataclasses.replace(made, trajectories=(dataclasses.replace(first, finish_reason="length"), *others))
    documents = batch.build([cut], algorithm=algorithm, policy_version=5, max_staleness=4, forks={}).documents
    assert not documents[0].response_mask.any()
    assert not documents[0].loss_weights.any()
    assert documents[1].response_mask.any()
