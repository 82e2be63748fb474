"""The number of groups that may be outstanding, in each of the three modes."""

from __future__ import annotations

from asyncrl.policies.staleness.admission import Admission


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
