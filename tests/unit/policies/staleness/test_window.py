"""How many groups a run keeps outstanding: as many as keep its learner fed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import run_file
from asyncrl.policies.staleness.window import STEPS, NeededWindow


def window(count: int = 4, *, bound: int = 4) -> NeededWindow:
    return NeededWindow(groups_per_batch=count, largest=count * (bound + 1))


def test_it_begins_with_one_batch_in_training_and_one_in_generation() -> None:
    assert window(bound=4).size == 8
    assert window(bound=0).size == 4


def test_a_learner_that_waits_gets_what_it_lacked() -> None:
    one = window()  # 8 groups, of which 4 are trained
    one.observe(finished=1, unfinished=3)  # 3 are missing: 11, and a margin of 1
    assert one.size == 12


def test_an_engine_that_cannot_keep_up_gets_the_full_window() -> None:
    one = window()
    for _ in range(4):
        one.observe(finished=0, unfinished=one.size - 4)
    assert one.size == 20


def test_a_learner_that_waits_for_late_groups_gets_the_full_window() -> None:
    one = window()
    one.observe(finished=5, unfinished=3, waited=True)
    assert one.size == 20


def test_what_was_spare_for_all_recent_steps_is_closed() -> None:
    one = window()
    for _ in range(4):
        one.observe(finished=0, unfinished=one.size - 4)
    for _ in range(STEPS):  # the engine became fast: everything published is finished when the learner asks
        one.observe(finished=one.size - 4, unfinished=0)
    assert one.size == 9  # a batch in training, one ready, and the margin


def test_a_single_slow_answer_keeps_the_window_open_for_some_steps() -> None:
    one = window()
    one.observe(finished=0, unfinished=4)
    opened = one.size
    for _ in range(STEPS - 1):
        one.observe(finished=one.size - 4, unfinished=0)
        assert one.size >= opened


def test_groups_of_a_wider_window_count_while_it_shrinks() -> None:
    one = window()
    one.observe(finished=12, unfinished=8)  # 20 are out: 8 are spare
    assert one.size == 13


@given(
    count=st.integers(1, 16),
    bound=st.integers(0, 8),
    slow=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    lag=st.integers(0, 8),
)
def test_a_learner_never_starves_and_the_bound_holds(count: int, bound: int, slow: list[int], lag: int) -> None:
    """Whatever engines do, and however late weights are announced: after a step, a batch is there or on its way, if
    the full window allows it."""
    one, published = window(count, bound=bound), 0
    for step, unfinished in enumerate(slow):
        released = max(0, step - lag % (bound + 1))
        published = max(published, count * released + one.size)
        outstanding = published - count * step
        finished = max(0, outstanding - unfinished)
        if step:
            one.observe(finished=finished, unfinished=outstanding - finished)
        published = max(published, count * released + one.size)
        assert one.size <= count * (bound + 1)
        assert published - count * step >= min(count, count * (released + bound + 1 - step))


def test_only_async_without_a_full_window_has_one() -> None:
    def size(mode: str, admission: str, order: str = "oldest_first") -> int | None:
        run = run_file.from_table(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "run": {"mode": mode},
                "staleness": {"admission": admission, "max_staleness": 4 if mode == "async" else 0, "order": order},
                "learner": {"groups_per_batch": 4},
            },
            where="run.toml",
        )
        found = NeededWindow.from_run(run)
        return None if found is None else found.size

    assert size("async", "needed") == 8
    assert size("async", "full") is None
    assert size("async", "needed", "in_order") is None  # the learner waits for one group beside many finished ones
    assert size("sync", "needed") is None
