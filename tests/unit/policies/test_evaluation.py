"""Evaluation: estimators, the share of the engines' time, and the results of a data set."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.evaluation.pinned_workers import EngineTime, num_pinned
from asyncrl.policies.evaluation.results import (
    Answered,
    Measured,
    counts_of_k,
    interval,
    majority,
    metric_names,
    metrics,
    pass_all_k,
    pass_at_k,
)

SOLVED = st.lists(st.booleans(), min_size=1, max_size=8)


@given(SOLVED, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_answer(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(itertools.combinations(solved, k))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(SOLVED, st.data())
def test_pass_all_k_is_the_share_of_subsets_without_an_unsolved_answer(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(itertools.combinations(solved, k))
    assert pass_all_k(len(solved), sum(solved), k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (4, 4), (6, 3)])
def test_both_are_unbiased(chance: float, n: int, k: int) -> None:
    """Averaged over every outcome of n answers, both estimators equal the probabilities for k."""
    at_least_one = all_of_them = 0.0
    for outcome in itertools.product([False, True], repeat=n):
        probability = chance ** sum(outcome) * (1 - chance) ** (n - sum(outcome))
        at_least_one += probability * pass_at_k(n, sum(outcome), k)
        all_of_them += probability * pass_all_k(n, sum(outcome), k)
    assert at_least_one == pytest.approx(1 - (1 - chance) ** k)
    assert all_of_them == pytest.approx(chance**k)


@given(SOLVED)
def test_one_of_one_is_the_share_of_solved_answers(solved: list[bool]) -> None:
    n, c = len(solved), sum(solved)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_all_k(n, c, 1) == pytest.approx(c / n)


def test_large_numbers_stay_exact() -> None:
    # C(1000, 500) is over 10^299; 1 - C(990, 500) / C(1000, 500) is 1 - 0.000966... by exact fractions
    assert pass_at_k(1000, 10, 500) == pytest.approx(1 - 0.00095, abs=5e-5)
    assert pass_at_k(10_000, 0, 5_000) == 0.0
    assert pass_all_k(10_000, 10_000, 5_000) == 1.0


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_what_cannot_be_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="impossible"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="impossible"):
        pass_all_k(n, c, k)


@pytest.mark.parametrize(
    "votes, solved, expected",
    [
        (["5", "5", "7"], [True, True, False], 1.0),
        (["5", "7", "7"], [True, False, False], 0.0),
        (["5", "7"], [True, False], 0.5),  # a tie: either answer may be taken
        (["5", "", "", ""], [True, False, False, False], 1.0),  # an empty answer has no vote
        (["", ""], [False, False], 0.0),
        (["5", "5"], [True, False], 0.5),  # the reward judged equal answers differently
    ],
)
def test_the_majority_is_what_most_answers_come_down_to(votes: list[str], solved: list[bool], expected: float) -> None:
    assert majority(votes, solved) == expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
def test_the_order_of_the_answers_does_not_matter_to_the_majority(votes: list[str]) -> None:
    solved = [vote == "a" for vote in votes]
    backwards = majority(votes[::-1], solved[::-1])
    assert majority(votes, solved) == pytest.approx(backwards)


@pytest.mark.parametrize("n, ks", [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (3, [1, 2, 3])])
def test_k_doubles_up_to_the_number_of_answers(n: int, ks: list[int]) -> None:
    assert counts_of_k(n) == ks


@pytest.mark.parametrize(
    ("share", "workers", "held"),
    [(0.25, 8, 2), (0.25, 7, 1), (0.25, 4, 1), (0.5, 3, 1), (1.0, 3, 3), (0.25, 2, 1), (0.25, 0, 1)],
)
def test_no_more_than_the_share_is_held_but_one_at_least(share: float, workers: int, held: int) -> None:
    assert num_pinned(share, workers) == held


def test_each_worker_counts_from_when_it_had_the_version_until_the_end() -> None:
    time = EngineTime(began=100.0)
    time.record("w0", pinned_seconds=3.0, now=105.0)  # since 102
    time.record("w0", pinned_seconds=6.0, now=108.0)
    time.record("w1", pinned_seconds=1.0, now=106.0)  # since 105
    assert time.share(num_engines=4, now=110.0) == (8.0 + 5.0) / (4 * 10.0)


def test_engines_that_nobody_heard_of_are_no_share_over_one() -> None:
    time = EngineTime(began=0.0)
    for name in ("w0", "w1", "w2"):
        time.record(name, pinned_seconds=9.0, now=1.0)
    assert time.share(num_engines=1, now=2.0) == 1.0
    assert EngineTime(began=2.0).share(num_engines=1, now=2.0) == 0.0


def answered(rewards: list[float], *, votes: str = "", tags: tuple[str, ...] = (), cut: int = 0) -> Answered:
    n = len(rewards)
    return Answered(
        rewards=tuple(rewards),
        votes=tuple(votes) or ("",) * n,
        lengths=tuple(range(1, n + 1)),
        truncated=tuple(index < cut for index in range(n)),
        tags=tags,
    )


def test_a_data_set_by_hand() -> None:
    measured = Measured(num_prompts=3, num_samples=4, has_labels=True)
    found = metrics(
        "sums",
        measured,
        [answered([1, 1, 0, 0], votes="aabc"), answered([0, 0, 0, 0.5], votes="abcc", cut=1)],
        seed=0,
    )
    assert found["sums/prompts"] == 3
    assert found["sums/missing"] == 1
    assert found["sums/mean@4"] == pytest.approx((0.5 + 0.125) / 2)
    assert found["sums/pass@1"] == pytest.approx(0.25)
    assert found["sums/pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # in one of the 6 pairs, both answers are unsolved
    assert found["sums/pass@4"] == pytest.approx(0.5)
    assert found["sums/pass^2"] == pytest.approx(1 / 6 / 2)
    assert found["sums/pass^4"] == 0.0
    assert found["sums/majority@4"] == pytest.approx(0.5)
    assert found["sums/length_mean"] == 2.5
    assert found["sums/truncated_fraction"] == 1 / 8
    assert found["sums/mean@4/low"] <= found["sums/mean@4"] <= found["sums/mean@4/high"]


@pytest.mark.parametrize("own", [{"missing": 3.0}, {"a": "x"}, None])
def test_metrics_of_the_users_own_that_cannot_be_leave_the_others(own: Any) -> None:
    measured = Measured(num_prompts=1, num_samples=1, own=lambda answered: own)
    found = metrics("a", measured, [answered([1.0])], seed=0)
    assert (found["a/own_failed"], found["a/missing"], found["a/mean@1"]) == (1.0, 0.0, 1.0)


def test_what_counts_as_solved_is_the_data_sets_own() -> None:
    rewards = [answered([0.5, 0.4])]
    strict = metrics("d", Measured(num_prompts=1, num_samples=2), rewards, seed=0)
    lenient = metrics("d", Measured(num_prompts=1, num_samples=2, solved_at=0.5), rewards, seed=0)
    assert (strict["d/pass@1"], lenient["d/pass@1"]) == (0.0, 0.5)
    assert "d/majority@2" not in strict  # without labels


def test_each_tag_has_the_same_numbers() -> None:
    measured = Measured(num_prompts=3, num_samples=1, tags={"easy": 2, "hard": 2})
    found = metrics(
        "d",
        measured,
        [answered([1.0], tags=("easy",)), answered([0.0], tags=("hard",)), answered([1.0], tags=("easy", "hard"))],
        seed=0,
    )
    assert found["d[easy]/mean@1"] == 1.0
    assert found["d[hard]/mean@1"] == 0.5
    assert found["d[hard]/missing"] == 0.0


def test_every_name_is_told_beforehand() -> None:
    found = metrics("d", Measured(num_prompts=1, num_samples=3, has_labels=True), [answered([1, 0, 0])], seed=0)
    means = {name for name in found if "@" in name or "^" in name if not name.endswith(("/low", "/high"))}
    assert means == {f"d/{name}" for name in metric_names(3, has_labels=True)}


def test_the_interval_is_that_of_every_resample() -> None:
    """4 prompts have 4^4 resamples. The quantiles of their means match, up to the error of 20,000 drawn resamples."""
    values = np.array([[0.0], [0.25], [0.5], [1.0]])
    means = sorted(float(np.mean(drawn)) for drawn in itertools.product(values[:, 0], repeat=4))
    low, high = interval(values, seed=3, resamples=20_000)
    assert low[0] == pytest.approx(np.quantile(means, 0.025), abs=0.07)
    assert high[0] == pytest.approx(np.quantile(means, 0.975), abs=0.07)
