"""A fleet grows while the learner waits, shrinks while engines are idle, and settles in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.fleet_size import STEPS, Change, FleetSizer, Shares, better_size


def row(*, learner: float, engines: float, workers: int, discarded: float = 0.0) -> dict[str, float]:
    """Make the metrics of a ten-second step. ``learner`` and ``engines`` are busy shares of the step."""
    return {
        "learner/step_seconds": 10 * learner,
        "learner/wait_seconds": 10 * (1 - learner),
        "rollout/idle_ratio": 1 - engines,
        "rollout/workers": float(workers),
        "staleness/dropped_share": discarded,
    }


def looks(sizer: FleetSizer, numbers: dict[str, float], *, own: int, times: int = STEPS) -> Change | None:
    """Return the sizer's answer to the last of ``times`` looks; all earlier answers must be None."""
    for _ in range(times - 1):
        assert sizer.update(numbers, own=own) is None
    return sizer.update(numbers, own=own)


def test_a_fleet_whose_learner_waits_gets_as_many_workers_as_keep_it_busy() -> None:
    change = looks(FleetSizer(least=1, most=8), row(learner=0.6, engines=1.0, workers=3), own=3)
    assert change is not None and change.workers == 5
    assert change.because == (
        "in 10 steps the learner was idle for 40% of the time and engines for 0%, and 0% of the answers were too old"
    )


def test_a_fleet_at_most_doubles_at_once_and_never_exceeds_what_is_allowed() -> None:
    assert better_size(2, Shares(learner_busy=0.05, engines_busy=1.0)) == 4
    change = looks(FleetSizer(least=1, most=3), row(learner=0.05, engines=1.0, workers=2), own=2)
    assert change is not None and change.workers == 3
    assert looks(FleetSizer(least=1, most=3), row(learner=0.05, engines=1.0, workers=3), own=3) is None


def test_a_fleet_whose_engines_wait_for_the_learner_shrinks_and_keeps_a_reserve() -> None:
    change = looks(FleetSizer(least=1, most=8), row(learner=1.0, engines=0.5, workers=8), own=8)
    assert change is not None and change.workers == 5
    at_least = looks(FleetSizer(least=7, most=8), row(learner=1.0, engines=0.5, workers=8), own=8)
    assert at_least is not None and at_least.workers == 7


def test_what_is_thrown_away_as_too_old_counts_as_not_needed() -> None:
    change = looks(FleetSizer(least=1, most=8), row(learner=1.0, engines=1.0, workers=8, discarded=0.4), own=8)
    assert change is not None and change.workers == 6


def test_where_both_wait_for_something_else_the_fleet_stays() -> None:
    """Slow rewards, long answers, the staleness bound: more or fewer engines do not help."""
    assert better_size(4, Shares(learner_busy=0.5, engines_busy=0.6)) == 4


def test_where_there_was_no_room_for_more_no_more_is_asked_for() -> None:
    sizer = FleetSizer(least=1, most=8)
    assert looks(sizer, row(learner=0.5, engines=1.0, workers=2), own=2) is not None
    sizer.limit_to(2)
    assert looks(sizer, row(learner=0.5, engines=1.0, workers=2), own=2, times=3 * STEPS) is None


def test_each_change_is_seen_for_ten_steps_before_the_next_and_the_first_steps_do_not_count() -> None:
    sizer = FleetSizer(least=1, most=8, warmup=3)
    waits = row(learner=0.5, engines=1.0, workers=2)
    assert looks(sizer, waits, own=2, times=3) is None
    assert looks(sizer, waits, own=2, times=9) is None
    assert sizer.update(row(learner=0.5, engines=1.0, workers=3), own=3) is None  # another worker was added
    change = looks(sizer, row(learner=0.5, engines=1.0, workers=3), own=3, times=9)
    assert change is not None and change.workers == 6


@given(start=st.integers(1, 64), needed=st.floats(0.3, 64.0))
def test_a_fleet_comes_to_rest(start: int, needed: float) -> None:
    """``needed`` workers sample as much as the learner trains. From any start, the fleet moves in one direction in a
    few steps. At the end the learner waits for at most 15 % of the time, and no worker is superfluous."""

    def shares(workers: int) -> Shares:
        return Shares(learner_busy=min(1.0, workers / needed), engines_busy=min(1.0, needed / workers))

    sizes = [start]
    while (size := better_size(sizes[-1], shares(sizes[-1]))) != sizes[-1]:
        sizes.append(size)
        assert len(sizes) < 12
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))
    assert shares(size).learner_busy >= 0.85
    assert size <= max(start, needed + 1) and (size == 1 or size <= needed / 0.8 + 1)


@given(
    now=st.integers(1, 1000),
    learner=st.floats(0, 1),
    engines=st.floats(0, 1),
    discarded=st.floats(0, 1),
)
def test_a_size_is_never_none_and_never_more_than_twice(
    now: int, learner: float, engines: float, discarded: float
) -> None:
    size = better_size(now, Shares(learner_busy=learner, engines_busy=engines, discarded=discarded))
    assert 1 <= size <= 2 * now
