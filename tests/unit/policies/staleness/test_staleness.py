"""Staleness: what is admitted, how old a token is, and what a step takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.groups import selection
from asyncrl.policies.groups.selection import Key
from asyncrl.policies.learning_rate import vcpo_learning_rate
from asyncrl.policies.staleness import staleness
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.staleness.staleness import effective_version, oldest_version, per_token
from tests.harness.groups import span

keys = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), unique_by=lambda key: key[1], max_size=10)


# -- admission ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(1, 8), st.integers(0, 8), st.integers(0, 80))
def test_our_window_is_areal_s_capacity_where_nothing_is_lost(
    steps: int, batch: int, bound: int, published: int
) -> None:
    ours = Admission(mode="async", groups_per_batch=batch, max_staleness=bound, total_groups=10**6)
    window = ours.may_publish(published=published, lost=0, batches_taken=steps, steps_done=steps)
    areal = (bound + steps + 1) * batch - published  # (eta + v + 1) B - (accepted + running)
    assert window == max(0, areal)


# -- order -------------------------------------------------------------------------------------------------------------


@given(keys, st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from(sorted(selection.ORDERS)))
def test_what_is_selected_does_not_depend_on_arrival(held: list[Key], random: object, count: int, name: str) -> None:
    shuffled = list(held)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    order = selection.ORDERS[name]
    assert selection.select(held, count=count, order=order) == selection.select(shuffled, count=count, order=order)


def test_the_three_orders() -> None:
    held = [(3, 5), (4, 2), (3, 7), (5, 9)]
    assert selection.select(held, count=4) == [(3, 5), (3, 7), (4, 2), (5, 9)]
    assert selection.select(held, count=3, order=selection.freshest_first) == [(5, 9), (4, 2), (3, 5)]
    assert selection.select(held, count=2, order=selection.in_order) == [(4, 2), (3, 5)]
    assert selection.select(held, count=5) is None


def test_in_order_stops_at_the_first_group_that_is_missing() -> None:
    held = [(1, 0), (1, 1), (2, 3), (2, 5)]
    assert selection.leading(held, is_done=lambda _: False) == [(1, 0), (1, 1)]
    assert selection.leading(held, is_done={2}.__contains__) == [(1, 0), (1, 1), (2, 3)]
    assert selection.leading(held, is_done={2, 4}.__contains__) == held
    assert selection.leading(held, is_done=lambda _: True) == held
    assert selection.leading([], is_done=lambda _: True) == []


# -- weights and statistics --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 50), min_size=1, max_size=20))
def test_staleness_weights_are_one_when_fresh_and_fall_with_age(ages: list[int]) -> None:
    ordered = np.sort(ages)
    for weights in (
        staleness.exponential_weight(ordered),
        staleness.inverse_weight(ordered),
        staleness.linear_weight(ordered, max_staleness=8),
    ):
        assert (np.diff(weights) <= 0).all()
        assert ((weights >= 0) & (weights <= 1)).all()
        assert (weights[ordered <= 0] == 1).all()


def test_a_linear_weight_is_above_nothing_at_the_bound_and_nothing_beyond() -> None:
    assert staleness.linear_weight([4, 5], max_staleness=4).tolist() == pytest.approx([0.2, 0.0])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_lag_is_the_time_in_flight_and_in_the_queue(start: int, flight: int, queue: int) -> None:
    found = staleness.lag(policy_version=start + flight + queue, start=start, end=start + flight)
    assert (found.in_flight, found.in_queue, found.total) == (flight, queue, flight + queue)


# -- controllers -------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1.0), st.floats(0.1, 1.0), st.sampled_from(["sqrt", "linear"]))
def test_the_scaled_learning_rate_rises_with_the_ess_and_never_over_the_given_one(
    ess: float, base: float, rule: str
) -> None:
    found = vcpo_learning_rate(1e-6, ess_fraction=ess, base_ess_fraction=base, rule=rule)
    assert 0 < found <= 1e-6
    assert found <= vcpo_learning_rate(1e-6, ess_fraction=min(1.0, ess * 2), base_ess_fraction=base, rule=rule)
    if ess >= base:
        assert found == 1e-6


def test_staleness_is_counted_per_token() -> None:
    ages = per_token((span(3), span(5, start=2)), length=4, policy_version=6, resume_points={})
    assert ages.tolist() == [3, 3, 1, 1]


def test_rolled_back_versions_count_as_old_as_the_resume_point() -> None:
    # Incarnation 0 reached version 9; then the learner fell back to a checkpoint at 6 and started incarnation 1 there.
    resume_points = {1: 6}
    assert effective_version(span(9, epoch=0), resume_points) == 6
    assert effective_version(span(4, epoch=0), resume_points) == 4
    assert effective_version(span(9, epoch=1), resume_points) == 9
    assert oldest_version((span(9, epoch=0), span(8, start=2, epoch=1)), resume_points) == 6


def test_a_second_fall_back_counts_from_the_earlier_resume_point() -> None:
    assert effective_version(span(9, epoch=0), {1: 6, 2: 3}) == 3


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
