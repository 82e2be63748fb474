"""Prompts are issued again when nobody answers, later each time, and never while answers come as they used to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.groups.overdue import REISSUES, Overdue


class Looks:
    """Ids are given in order; a group that no look saw has come and gone."""

    def __init__(self, seconds: float) -> None:
        self.overdue = Overdue(seconds)
        self._next = 0

    def __call__(self, outstanding: set[int], *, now: float) -> list[int]:
        self._next = max({*outstanding, self._next - 1}) + 1
        return self.overdue.look(outstanding, next_group_id=self._next, now=now)

    def answered(self, group_id: int, seconds: float, *, at: float = 0.0) -> None:
        """One group has been answered, ``seconds`` after it was asked for."""
        self({group_id}, now=at)
        self(set(), now=at + seconds)


def test_what_nobody_answers_is_issued_again_and_later_each_time() -> None:
    look = Looks(60)
    look.answered(0, 1.0)
    issued = [second for second in range(2, 1000) if look({1, 2}, now=float(second)) == [1, 2]]
    assert issued == [62, 182, 362, 602, 902]


def test_nothing_is_issued_again_while_others_are_answered() -> None:
    look = Looks(60)
    for second in range(0, 600, 20):
        assert look({0, 1 + second}, now=float(second)) == []
    assert look({0}, now=600.0) == look({0}, now=659.0) == []
    assert look({0}, now=660.0) == [0]


def test_what_is_answered_between_two_looks_counts_too() -> None:
    look = Looks(10)
    look({0, 1}, now=0.0)
    for second in range(2, 60, 2):
        assert look({0, 1, second}, now=float(second)) == []  # one more has come and gone
    assert look({0, 1}, now=60.0) == look({0, 1}, now=69.0) == []
    assert look({0, 1}, now=70.0) == [0, 1]


def test_what_takes_long_here_is_given_four_times_as_long_as_half_of_the_others() -> None:
    """And one group that somebody kept for long does not make the next wait longer."""
    look = Looks(60)
    for number, seconds in enumerate((500.0, 500.0, 500.0, 90_000.0)):
        look.answered(number, seconds, at=1000.0 * number)
    look({4}, now=100_000.0)
    assert look({4}, now=101_999.0) == []
    assert look({4}, now=102_000.0) == [4]


def test_engines_that_start_are_given_five_times_as_long() -> None:
    look = Looks(60)
    assert look({0, 1}, now=0.0) == look({0, 1}, now=299.0) == []
    assert look({0, 1}, now=300.0) == [0, 1]


def test_zero_issues_nothing_again() -> None:
    look = Looks(0)
    assert not any(look({1}, now=float(second)) for second in range(0, 100_000, 100))
    assert look.overdue.reissues_left == 0


def test_all_are_in_vain_once_each_was_issued_again_twice_and_an_answer_or_a_new_group_begins_anew() -> None:
    look = Looks(1)
    assert look.overdue.reissues_left == 0  # nothing is outstanding
    look.answered(0, 0.1)
    for now, left in ((1.0, REISSUES), (2.0, REISSUES - 1), (4.0, 0)):
        look({1}, now=now)
        assert look.overdue.reissues_left == left
    look({1, 2}, now=5.0)
    assert look.overdue.reissues_left == REISSUES


@given(st.lists(st.tuples(st.floats(0.1, 50), st.sets(st.integers(0, 9))), max_size=60), st.floats(1, 100))
def test_only_outstanding_groups_are_issued_and_none_twice_within_its_patience(
    looks: list[tuple[float, set[int]]], seconds: float
) -> None:
    look, now, last = Looks(seconds), 0.0, dict[int, float]()
    for pause, outstanding in looks:
        now += pause
        last = {group_id: since for group_id, since in last.items() if group_id in outstanding}
        due = look(outstanding, now=now)
        assert set(due) <= outstanding
        for group_id in due:
            assert now - last.get(group_id, 0.0) >= seconds
            last[group_id] = now
