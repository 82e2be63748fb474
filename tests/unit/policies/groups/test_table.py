"""The group table alone: for any events in any order, no group is lost and no group is done twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Heartbeat
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.groups.started_groups import StartedGroups
from asyncrl.policies.groups.states import Outcome, PublishedPrompt
from asyncrl.policies.groups.table import GroupTable
from tests.harness.groups import group


def table(count: int = 0) -> GroupTable:
    """A table with ``count`` outstanding groups."""
    made = GroupTable()
    for group_id in range(count):
        made.publish(group_id, position=group_id, oldest_start=0)
    return made


# -- one event at a time -----------------------------------------------------------------------------------------------


def test_a_group_delivered_twice_is_buffered_once() -> None:
    made = table(1)
    assert made.arrive(1, group(0), now=0.0).became == "buffered"
    assert made.arrive(2, group(0), now=0.0).became == "duplicate"
    made.take([made.buffered[0]])
    assert made.arrive(3, group(0), now=0.0).became == "duplicate"
    made.trained(max_staleness=0)
    assert made.arrive(4, group(0), now=0.0).became == "duplicate"
    assert made.consumed.as_json() == {"watermark": 5, "beyond": []}


def test_a_group_whose_first_record_somebody_deleted_comes_back_with_its_second() -> None:
    """The second record was read while the group was buffered. The learner dies before the group is trained."""
    made = table(1)
    made.arrive(1, group(0), now=0.0)
    assert made.arrive(2, group(0), now=0.0).became == "duplicate"  # stored in place of the deleted first record
    made = saved_table.restore(saved_table.save(made, groups_per_batch=1, history=0))
    assert made.skip(2) == [1]
    assert made.arrive(2, group(0), now=0.0).became == "buffered"
    made.filter(0)
    assert made.consumed.watermark == 3


def test_a_log_that_went_back_is_read_again_and_what_was_trained_is_not_trained_again() -> None:
    """Entry 1 was trained, entry 2 buffered. The server lost both, and workers stored other entries in their places."""
    made = table(4)
    for number in (0, 1):
        made.arrive(number + 1, group(number), now=0.0)
    made.take([made.buffered[0]])
    made.trained(max_staleness=0)
    made.start_new_log(first=1)
    assert made.cursor == 0
    assert made.arrive(1, group(2), now=0.0).became == "buffered"  # its sequence was consumed in the lost log
    assert made.arrive(2, group(0), now=0.0).became == "duplicate"
    assert made.arrive(3, group(1), now=0.0).became == "duplicate"
    assert 3 not in made.consumed  # the buffered group has a record again, kept until the group is done
    assert made.buffered.keys() == {1, 2}
    made.drop([made.buffered[1]])
    assert 3 in made.consumed
    assert 1 not in made.consumed


def test_a_checkpoint_knows_the_log_and_its_last_record() -> None:
    made = table(2)
    made.follow_log("made at noon")
    made.arrive(1, group(0), now=0.0, stored=17)
    state = saved_table.save(made, groups_per_batch=2, history=0)
    assert state.log == {"identity": "made at noon", "sequence": 1, "stored": 17}
    again = saved_table.restore(state)
    assert (again.log, again.last_read, again.cursor) == ("made at noon", (1, 17), 0)


def test_a_group_that_nobody_asked_for_is_rejected() -> None:
    made = table(1)
    assert made.arrive(1, group(1), now=0.0).became == "rejected"
    assert made.arrive(2, None, now=0.0).became == "rejected"
    assert made.consumed.watermark == 3
    assert made.outstanding.keys() == {0}


def test_a_group_with_an_error_fails_at_once_and_says_why() -> None:
    made = table(1)
    arrival = made.arrive(1, group(0, error="reward raised"), now=0.0)
    assert arrival.outcome == Outcome(
        fate="failed",
        group_ids=(0,),
        step=0,
        events=({"group_id": 0, "worker": "", "error": "reward raised"},),
    )
    assert (made.failed_in_a_row, made.problem) == (1, "reward raised")
    assert 1 in made.consumed


def test_records_that_are_gone_unread_hold_up_no_trim_and_leave_their_groups_outstanding() -> None:
    made = table(4)
    made.arrive(1, group(0), now=0.0)
    assert made.skip(2) == []
    assert made.skip(4) == [2, 3]
    made.arrive(4, group(3), now=0.0)
    made.take(list(made.buffered.values()))
    made.trained(max_staleness=0)
    assert made.consumed.watermark == 5
    assert set(made.outstanding) == {1, 2}


def test_a_record_that_is_read_again_takes_nothing_from_those_that_wait() -> None:
    made = table(3)
    for number in range(3):
        made.arrive(number + 1, group(number), now=0.0)
    made.arrive(1, group(0), now=0.0)
    assert made.skip(4) == []
    assert 2 not in made.consumed


def test_the_next_group_that_is_made_ends_a_row_of_failures() -> None:
    made = table(2)
    made.arrive(1, group(0, error="reward raised"), now=0.0)
    made.arrive(2, group(1), now=0.0)
    assert (made.failed_in_a_row, made.problem) == (0, "")


def test_a_batch_in_training_is_consumed_when_its_step_is_done_and_not_before() -> None:
    made = table(2)
    made.arrive(1, group(0), now=0.0)
    made.arrive(2, group(1), now=0.0)
    made.take([made.buffered[1], made.buffered[0]])
    assert (made.consumed.watermark, made.policy_version) == (1, 0)
    assert made.trained(max_staleness=1) == Outcome(
        fate="trained", group_ids=(1, 0), sequences=(2, 1), step=1, max_staleness=1
    )
    assert (made.consumed.watermark, made.policy_version) == (3, 1)


def test_what_is_dropped_says_how_old_and_how_long_it_was() -> None:
    made = table(1)
    made.arrive(1, group(0, version=1), now=0.0)
    made.step = 4
    outcome = made.drop([made.buffered[0]])
    assert outcome.events == ({"group_id": 0, "reason": "stale", "staleness": 3, "lengths": [3, 3]},)
    assert made.take_lengths() == ([3, 3], [3, 3])
    assert made.take_lengths() == ([], [])


def test_a_group_of_a_rolled_back_incarnation_has_no_known_start() -> None:
    made = table(1)
    made.publish(1, position=5)
    assert made.outstanding[1].oldest_start is None
    assert made.position == 6


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


def beat(
    version: int, *, begun: dict[int, int] | None = None, incarnation: int = 0, phase: str = "running"
) -> Heartbeat:
    return Heartbeat(
        actor="w",
        role="rollout-worker",
        incarnation=incarnation,
        policy_version=version,
        phase=phase,
        begun={str(group): oldest for group, oldest in (begun or {}).items()},
    )


def admitted(*versions: int | None) -> dict[int, PublishedPrompt]:
    return {group: PublishedPrompt(position=group, oldest_start=one) for group, one in enumerate(versions)}


def starts(
    *heard: list[Heartbeat], of: dict[int, PublishedPrompt], resume_points: dict[int, int] | None = None
) -> list[int]:
    started = StartedGroups()
    for beats in heard:
        started.update(beats, outstanding=of, resume_points=resume_points or {})
    return started.starts(of)


def test_a_group_is_as_old_as_the_version_that_began_it() -> None:
    assert starts([beat(6, begun={0: 4})], of=admitted(1)) == [4]


def test_a_group_that_nobody_has_begun_is_as_old_as_the_oldest_version_that_can_begin_it() -> None:
    assert starts([beat(6), beat(5), beat(0, phase="starting")], of=admitted(1)) == [5]


def test_a_group_is_never_older_than_the_version_that_admitted_it() -> None:
    assert starts([beat(2, begun={0: 0})], of=admitted(3, 4)) == [3, 4]


def test_what_a_dead_worker_had_begun_keeps_its_age_until_another_takes_it_over() -> None:
    """The worker that takes over continues from the saved tokens, or reports a new start."""
    lived = [beat(6, begun={0: 3})]
    assert starts(lived, [beat(7)], of=admitted(1)) == [3]
    assert starts(lived, [beat(7)], [beat(7, begun={0: 7})], of=admitted(1)) == [7]


def test_a_rolled_back_version_counts_as_the_resume_point() -> None:
    assert starts([beat(9, begun={0: 8}, incarnation=0)], of=admitted(1, 1), resume_points={1: 5}) == [5, 5]


@given(
    of=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda given: admitted(*given)),
    truth=st.lists(
        st.tuples(st.integers(0, 12), st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=4)), max_size=4
    ),
)
def test_no_start_is_later_than_a_worker_can_have_begun(
    of: dict[int, PublishedPrompt], truth: list[tuple[int, dict[int, int]]]
) -> None:
    """Assumes truthful workers: a worker without a group will begin it with its current version or a newer one."""
    said = [beat(version, begun={g: min(v, version) for g, v in groups.items()}) for version, groups in truth]
    for number, start in enumerate(starts(said, of=of)):
        least = of[number].oldest_start or 0
        having = [one.begun[str(number)] for one in said if str(number) in one.begun]
        assert start >= least
        assert start <= max(least, min(having or [one.policy_version for one in said] or [0]))
