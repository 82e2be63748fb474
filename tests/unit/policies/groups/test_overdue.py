"""Unanswered prompts are issued again, but not while answers arrive or a worker is at work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import LEARNER, PROMPT_SOURCE, QUARANTINED, WORKER
from asyncrl.policies.groups.overdue import Overdue, all_wait_for_prompts


class Looks:
    """A look every two seconds. Ids are issued in order; a group that no look saw has come and gone in between."""

    def __init__(self, seconds: float) -> None:
        self.overdue = Overdue(seconds)
        self._next, self._now = 0, 0.0

    def until(self, now: float, outstanding: set[int], *, all_wait: bool = True) -> dict[float, list[int]]:
        """Return the ids that are issued again, by time."""
        self._next = max({*outstanding, self._next - 1}) + 1
        issued = {}
        while self._now < now:
            self._now += 2.0
            self.overdue.look(outstanding, next_group_id=self._next, now=self._now)
            if due := self.overdue.due(all_wait=all_wait):
                issued[self._now] = due
        return issued


def test_prompts_are_issued_again_each_time_the_seconds_have_passed() -> None:
    assert Looks(60).until(250, {0, 1}) == dict.fromkeys((62.0, 122.0, 182.0, 242.0), [0, 1])


def test_nothing_is_issued_again_while_a_worker_is_at_work() -> None:
    look = Looks(60)
    assert not look.until(1000, {0, 1}, all_wait=False)
    assert look.until(1002, {0, 1}) == {1002.0: [0, 1]}


def test_nothing_is_issued_again_while_others_are_answered() -> None:
    look = Looks(60)
    for number in range(1, 20):
        assert not look.until(50.0 * number, {0, number})
    assert look.until(1012, {0}) == {1012.0: [0]}


def test_an_answer_between_two_looks_counts() -> None:
    look = Looks(10)
    for number in range(1, 30):
        assert not look.until(2.0 * number, {0, 2 * number})  # another group was published and answered in between
    assert list(look.until(100, {0}))[0] == 70.0


def test_seconds_in_which_nothing_could_be_received_do_not_count() -> None:
    look = Looks(60)
    look.until(2, {0})
    look._now += 5000.0  # the process was stopped or cut off from the bus
    assert list(look.until(5100, {0})) == [5064.0]


def test_zero_seconds_issue_nothing_again() -> None:
    look = Looks(0)
    assert not look.until(10_000, {1})


@given(st.lists(st.tuples(st.floats(0.1, 50), st.sets(st.integers(0, 9)), st.booleans()), max_size=60))
def test_only_outstanding_groups_are_issued_and_none_twice_within_the_seconds(
    looks: list[tuple[float, set[int], bool]],
) -> None:
    overdue, now, last = Overdue(5.0), 0.0, dict[int, float]()
    for pause, outstanding, all_wait in looks:
        now += pause
        overdue.look(outstanding, next_group_id=10, now=now)
        last = {group_id: since for group_id, since in last.items() if group_id in outstanding}
        due = overdue.due(all_wait=all_wait)
        assert set(due) <= outstanding
        for group_id in due:
            assert now - last.get(group_id, 0.0) >= 5.0
            last[group_id] = now


def beat(*on: str, role: str = WORKER, phase: str = "running") -> Heartbeat:
    return Heartbeat(actor="w", role=role, phase=phase, waits=tuple(Wait(what="it", on=one, seconds=9) for one in on))


@pytest.mark.parametrize(
    ("beats", "all_wait"),
    [
        ([], False),
        ([beat(PROMPT_SOURCE, role=LEARNER)], False),
        ([beat(PROMPT_SOURCE), beat(PROMPT_SOURCE, "")], True),
        ([beat(PROMPT_SOURCE), beat()], False),
        ([beat(PROMPT_SOURCE), beat(PROMPT_SOURCE, "engine")], False),
        ([beat(PROMPT_SOURCE), beat("rollout")], False),
        ([beat(PROMPT_SOURCE), beat("start", phase="starting"), beat("x", phase=QUARANTINED)], True),
        ([beat("start", phase="starting")], False),
    ],
)
def test_nobody_is_at_work_where_every_worker_waits_for_prompts_and_nothing_else(
    beats: list[Heartbeat], all_wait: bool
) -> None:
    assert all_wait_for_prompts(beats) is all_wait
