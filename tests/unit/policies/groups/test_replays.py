"""Which trained groups are trained again: good groups, within the bound, as often as the rule allows."""

from __future__ import annotations

from asyncrl.policies.audit.entries import BEGUN, HistoryEntry
from asyncrl.policies.audit.replays import replays
from asyncrl.policies.groups.replays import Replays
from asyncrl.policies.groups.states import BufferedGroup, PublishedPrompt
from tests.harness.groups import group


def buffered(group_id: int, *rewards: float, oldest: int = 0) -> BufferedGroup:
    made = group(group_id, version=oldest, rewards=rewards)
    prompt = PublishedPrompt(position=group_id)
    return BufferedGroup(
        sequence=group_id + 1,
        group=made,
        prompt=prompt,
        oldest=oldest,
        youngest=oldest,
        newest=oldest,
        num_tokens=3,
        arrived=0.0,
    )


def never(one: BufferedGroup) -> bool:
    return False


def ids(groups: object) -> list[int]:
    return [one.group_id for one in groups]  # type: ignore[attr-defined]


def test_the_best_groups_whose_rewards_differ_are_trained_again() -> None:
    pool = Replays(per_step=2)
    pool.done([buffered(0, 1.0, 1.0), buffered(1, 0.0, 1.0), buffered(2, 1.0, 0.9), buffered(3, 0.0, 0.5)])
    assert ids(pool.take(is_stale=never)) == [2, 1]  # means 0.95 and 0.5; group 0 has equal rewards


def test_each_is_trained_again_as_often_as_allowed() -> None:
    pool = Replays(per_step=1, times=2)
    pool.done([buffered(0, 0.0, 1.0)])
    seen = []
    for _ in range(3):
        seen.append(ids(pool.take(is_stale=never)))
        pool.done([])
    assert seen == [[0], [0], []]


def test_what_is_too_old_is_trained_no_more() -> None:
    pool = Replays(per_step=1)
    pool.done([buffered(0, 0.0, 1.0, oldest=1), buffered(1, 0.0, 0.5, oldest=2)])
    assert ids(pool.take(is_stale=lambda one: one.oldest < 2)) == [1]
    assert 0 not in pool.pool


def test_a_batch_that_is_not_trained_takes_its_replays_with_it() -> None:
    pool = Replays(per_step=1, times=5)
    pool.done([buffered(0, 0.0, 1.0)])
    pool.take(is_stale=never)
    pool.discard()
    assert ids(pool.take(is_stale=never)) == []


def test_what_is_foreseen_is_what_is_taken() -> None:
    pool = Replays(per_step=2, times=1)
    pool.done([buffered(0, 0.0, 1.0), buffered(1, 0.0, 0.5), buffered(2, 0.0, 0.1)])
    pool.take(is_stale=never)
    training = [buffered(3, 0.2, 0.1)]
    foreseen = ids(pool.foresee(training, is_stale=never))
    pool.done(training)
    assert ids(pool.take(is_stale=never)) == foreseen == [3, 2]


def test_without_the_option_nothing_is_kept() -> None:
    pool = Replays()
    pool.done([buffered(0, 0.0, 1.0)])
    assert pool.pool == {}
    assert pool.take(is_stale=never) == []


def test_the_audit_tells_replays_by_the_rule_from_others() -> None:
    settings = {"staleness": {"replay_groups": 1, "replay_times": 1}}
    begun = HistoryEntry(kind=BEGUN, incarnation=0, step=0, position=0, settings=settings)

    def step(number: int, *groups: int, again: int) -> HistoryEntry:
        return HistoryEntry(
            kind="trained", incarnation=0, step=number, position=number, groups=groups, replayed=((again, 9),)
        )

    assert replays([begun, step(1, 0, again=0)])[1] == {0: "step 1 trained it again, and none before had"}
    count, problems = replays([begun, step(1, 0, again=5), step(2, 1, again=0), step(3, 2, again=0)])
    assert count == 3
    assert problems == {
        5: "step 1 trained it again, and none before had",
        0: "trained again 2 times, 1 are allowed",
    }
