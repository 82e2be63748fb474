"""Estimators, compared with an enumeration of every subset of the answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.evaluation.estimators import counts_of_k, majority, pass_all_k, pass_at_k

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
