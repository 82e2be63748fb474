"""The group table alone: whatever happens in whatever order, no group is lost and none is done twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.states import FATES, Outcome
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.adaptive import AdaptiveBound
from tests.harness.groups import group

BOUND = AdaptiveBound.fixed(2)


def table(count: int = 0) -> GroupTable:
    """With ``count`` outstanding groups."""
    made = GroupTable(bound=BOUND)
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


def test_a_log_that_went_back_is_read_again_and_what_was_trained_is_not_trained_again() -> None:
    """Entries 1 and 2 were trained and buffered; the server lost both, and workers stored others in their places."""
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
    assert 3 not in made.consumed  # the buffered group has a record again: it is kept until the group is done
    assert made.buffered.keys() == {1, 2}
    made.drop([made.buffered[1]])
    assert 3 in made.consumed
    assert 1 not in made.consumed


def test_a_checkpoint_knows_the_log_and_its_last_record() -> None:
    made = table(2)
    made.follow_log("made at noon")
    made.arrive(1, group(0), now=0.0, stored=17)
    state = made.save(groups_per_batch=2, history=0)
    assert state.log == {"identity": "made at noon", "sequence": 1, "stored": 17}
    assert not state.problem()
    again = GroupTable.restore(state, bound=BOUND)
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


def test_a_batch_that_is_put_back_is_buffered_again() -> None:
    made = table(1)
    made.arrive(1, group(0), now=0.0)
    made.take([made.buffered[0]])
    assert made.batches_taken == 1
    for _ in range(2):  # saying so again changes nothing
        made.put_back()
        assert made.buffered.keys() == {0}
        assert (made.training, made.batches_taken) == ({}, 0)


def test_what_is_dropped_says_how_old_and_how_long_it_was() -> None:
    made = table(1)
    made.arrive(1, group(0, version=1), now=0.0)
    made.step = 4
    outcome = made.drop([made.buffered[0]])
    assert outcome.events == ({"group_id": 0, "reason": "stale", "staleness": 3, "lengths": [3, 3]},)
    assert made.take_lengths() == ([3, 3], [3, 3])
    assert made.take_lengths() == ([], [])


def test_an_id_that_is_left_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="group 1 is published before group 0"):
        table().publish(1, position=0)


def test_a_prompt_that_is_published_again_counts_once_and_begins_anew() -> None:
    made = table(1)
    made.publish(0, position=0, oldest_start=7)
    assert (made.next_group_id, made.oldest_starts) == (1, [7])


def test_a_group_of_a_lost_history_has_no_known_start() -> None:
    made = table(1)
    made.publish(1, position=5)
    assert made.oldest_starts == [0]
    assert made.position == 6


# -- any sequence of events --------------------------------------------------------------------------------------------


MALFORMED = "rejected by the validator"


@dataclass
class World:
    """What is outside the table and outlives a learner: prompts on the bus, the trajectory log, and the run's folder.

    log          group ids, with their errors or MALFORMED; ``times_lost``: how often it was lost or went back
    turned_down  sequences of the log that were rejected when they were read
    history      lines as (fate, group ids); a checkpoint says how many there were
    checkpoints  the newest last; who falls back to one has lost those after it
    """

    published: int = 0
    log: list[tuple[int, str]] = field(default_factory=list)
    times_lost: int = 0
    turned_down: set[int] = field(default_factory=set)
    history: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    checkpoints: list[LearnerState] = field(default_factory=list)


class Run:
    """A run of any number of incarnations, killed anywhere, with a log that repeats itself.

    The learner reads the log in its order from the cursor, and all else comes in any order, as ``dice`` fall.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.world = World()
        self.table = table()
        self.rule = Selection(max_staleness=2)
        self.happened: Counter[str] = Counter()
        self.find_log()
        self.publish()

    def go_on(self) -> None:
        """One event that can happen now."""
        table, learner = self.table, {self.save: 3, self.publish: 6, self.answer: 8}
        learner |= {self.read: 8} if table.cursor < len(self.world.log) else {}
        learner |= {self.fail: 1, self.publish_again: 2} if table.outstanding else {}
        learner |= {self.leave_out: 2} if table.buffered else {}
        learner |= {self.take: 8} if table.buffered and not table.training else {}
        learner |= {self.end_step: 6} if table.training else {}
        killed = {self.crash: 1} if self.world.checkpoints else {self.crash_before_any_checkpoint: 0.5}
        events = learner | killed | {self.lose_the_bus: 0.3, self.go_back: 0.5}
        (event,) = self.dice.choices(list(events), list(events.values()))
        self.happened[event.__name__] += 1
        event()

    # -- what happens outside ------------------------------------------------------------------------------------------

    def publish(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            group_id = self.table.next_group_id
            self.table.publish(group_id, position=group_id, oldest_start=self.table.step)
        self.world.published = max(self.world.published, self.table.next_group_id)

    def publish_again(self) -> None:
        """The bus lost a prompt."""
        group_id = self.dice.choice(sorted(self.table.outstanding))
        self.table.publish(group_id, position=self.table.outstanding[group_id].position)

    def answer(self) -> None:
        """Workers answer groups: those that are asked for, any others, perhaps one that nobody asked for."""
        for _ in range(self.dice.randint(1, 4)):
            asked_for = sorted(self.table.outstanding)
            group_id = self.dice.randint(0, self.world.published)
            if asked_for and self.dice.random() < 0.7:
                group_id = self.dice.choice(asked_for)
            error = self.dice.choices(["", "reward raised", MALFORMED], [6, 2, 1])[0]
            self.world.log.append((group_id, error))

    # -- what the learner does -----------------------------------------------------------------------------------------

    def read(self) -> None:
        for _ in range(min(self.dice.randint(1, 4), len(self.world.log) - self.table.cursor)):
            self.read_one()

    def read_one(self) -> None:
        """The validator rejects some. Their groups stay outstanding."""
        sequence = self.table.cursor + 1
        group_id, error = self.world.log[sequence - 1]
        made = group(group_id, version=max(0, self.table.step - group_id % 3), error=error)
        arrival = self.table.arrive(sequence, None if error == MALFORMED else made, now=0.0)
        assert (arrival.outcome is not None) == (arrival.became == "failed")
        self.tell(arrival.outcome)
        if arrival.became == "rejected":
            self.world.turned_down.add(sequence)

    def fail(self) -> None:
        """A group whose place in the log is taken."""
        self.tell(self.table.fail(self.dice.choice(sorted(self.table.outstanding)), error="its place is taken"))

    def leave_out(self) -> None:
        """A filter finds nothing to learn from, a step fails with a group, or a worker is quarantined."""
        group_ids = sorted(self.table.buffered)
        how = self.dice.choice(["filter", "reject", "drop"])
        if how == "filter":
            self.tell(self.table.filter(self.dice.choice(group_ids)))
        elif how == "reject":
            self.tell(self.table.reject(self.dice.choice(group_ids), error="a step with it fails"))
        else:
            chosen = self.dice.sample(group_ids, self.dice.randint(1, len(group_ids)))
            self.tell(self.table.drop([self.table.buffered[one] for one in chosen], reason="quarantined"))

    def take(self) -> None:
        if stale := self.rule.stale(self.table):
            self.tell(self.table.drop(stale))
        if (chosen := self.rule.next_batch(self.table, count=self.dice.randint(1, 3))) is not None:
            self.table.take(chosen)

    def end_step(self) -> None:
        ages = [self.table.step - one.oldest for one in self.table.training.values()]
        assert max(ages) <= 2
        if self.dice.random() < 0.3:
            self.table.put_back()
        else:
            self.tell(self.table.trained(max_staleness=max(ages)))

    def save(self) -> None:
        self.world.checkpoints.append(self.table.save(groups_per_batch=2, history=len(self.world.history)))

    # -- kills ---------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The learner is killed, and goes on from the newest checkpoint or an older one; the rest is a lost history."""
        del self.world.checkpoints[max(1, len(self.world.checkpoints) - self.dice.randint(0, 2)) :]
        state = self.world.checkpoints[-1]
        del self.world.history[state.history :]
        self.table = GroupTable.restore(state, bound=BOUND)
        assert self.table.save(groups_per_batch=2, history=state.history) == state
        self.find_log()
        self.catch_up()

    def crash_before_any_checkpoint(self) -> None:
        self.world.history.clear()
        self.table = table()
        self.find_log()
        self.catch_up()

    def lose_the_bus(self) -> None:
        """The learner is killed, and the log is a new one: what it held must be made again."""
        state = self.table.save(groups_per_batch=2, history=len(self.world.history))
        self.table = GroupTable.restore(state, bound=BOUND)
        self.lose_log(kept=0)

    def go_back(self) -> None:
        """The server loses power: the log is what it was some records ago, and the learner reads it again."""
        waiting = self.table.buffered | self.table.training
        self.lose_log(kept=self.dice.randint(0, len(self.world.log)))
        assert (self.table.buffered | self.table.training).keys() == waiting.keys()

    def lose_log(self, *, kept: int) -> None:
        del self.world.log[kept:]
        self.world.times_lost += 1
        self.world.turned_down.clear()
        self.find_log()

    def find_log(self) -> None:
        """The reader compares the log with the one that the table knows."""
        identity = str(self.world.times_lost)
        if self.table.log not in ("", identity):
            self.table.start_new_log()
        self.table.follow_log(identity)

    def catch_up(self) -> None:
        """The prompt source finds on the bus what was published after the checkpoint."""
        for group_id in range(self.table.next_group_id, self.world.published):
            self.table.publish(group_id, position=group_id)

    def tell(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.world.history.append((outcome.fate, outcome.group_ids))

    def finish(self) -> None:
        """Killed once more, the learner reads the log to its end: nobody waits for what is there."""
        self.save()
        self.table = GroupTable.restore(self.world.checkpoints[-1], bound=BOUND)
        there = {
            one
            for sequence, (one, error) in enumerate(self.world.log, start=1)
            if error != MALFORMED and sequence not in self.world.turned_down
        }
        while self.table.cursor < len(self.world.log):
            self.read_one()
        assert there.isdisjoint(self.table.outstanding)

    # -- what holds at every moment ------------------------------------------------------------------------------------

    def check(self) -> None:
        self.each_group_is_in_one_place()
        self.the_counts_add_up()
        self.the_history_tells_the_fate_of_each_group_that_is_done_once()
        self.what_is_not_done_comes_back()
        self.what_is_saved_is_everything_but_what_the_log_brings_back()

    def each_group_is_in_one_place(self) -> None:
        places = [*self.table.outstanding, *self.table.buffered, *self.table.training]
        places += [group_id for group_id in range(self.world.published) if group_id in self.table.done]
        assert sorted(places) == list(range(self.table.next_group_id))

    def the_counts_add_up(self) -> None:
        waiting = len(self.table.outstanding) + len(self.table.buffered) + len(self.table.training)
        assert self.table.next_group_id == waiting + sum(self.table.counts.values())
        assert sum(self.table.counts.values()) == len(self.table.done)

    def the_history_tells_the_fate_of_each_group_that_is_done_once(self) -> None:
        told = [group_id for _, group_ids in self.world.history for group_id in group_ids]
        assert sorted(told) == [group_id for group_id in range(self.world.published) if group_id in self.table.done]
        for fate in FATES:
            assert self.table.counts[fate] == sum(len(ids) for name, ids in self.world.history if name == fate)

    def what_is_not_done_comes_back(self) -> None:
        """After a kill at this moment, every answer that is not done is in the log behind the saved ledger.

        But those whose record was lost with a log: their groups are asked for again, as all that are not done.
        """
        for one in (*self.table.buffered.values(), *self.table.training.values()):
            if one.sequence == 0:
                continue
            assert one.sequence not in self.table.consumed
            assert self.world.log[one.sequence - 1][0] == one.group_id

    def what_is_saved_is_everything_but_what_the_log_brings_back(self) -> None:
        saved = self.table.save(groups_per_batch=2, history=0).prompts
        waiting = self.table.outstanding.keys() | self.table.buffered.keys() | self.table.training.keys()
        assert saved.outstanding.keys() == waiting
        assert saved.next_group_id == self.table.next_group_id


@given(seed=st.integers(0, 2**32 - 1), events=st.integers(50, 100))
def test_no_sequence_of_events_loses_a_group_or_does_it_twice(seed: int, events: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(events):
        run.go_on()
        run.check()
    run.finish()
    run.check()


def test_such_a_sequence_has_every_event_many_times() -> None:
    """Or it would say little about them."""
    happened = Counter[str]()
    for seed in range(25):
        run = Run(random.Random(seed))
        for _ in range(75):
            run.go_on()
        happened += run.happened
    assert min(happened[event] for event in ("crash", "lose_the_bus", "go_back")) >= 10
    assert min(happened[event] for event in ("take", "end_step", "leave_out", "fail", "read", "save")) >= 25


@given(st.lists(st.integers(0, 7), min_size=8, max_size=30))
def test_every_group_that_the_log_brings_is_done_after_enough_steps(order: list[int]) -> None:
    """In any order, with any repeats, and a kill halfway."""
    order = [*order, *range(8)]
    made, trained = table(8), list[int]()
    state = made.save(groups_per_batch=1, history=0)
    for sequence, group_id in enumerate(order, start=1):
        made.arrive(sequence, group(group_id), now=0.0)
        if sequence == len(order) // 2:
            state = made.save(groups_per_batch=1, history=0)
            made = GroupTable.restore(state, bound=BOUND)
            for again in range(1, sequence + 1):  # from the cursor, which is at the beginning: nothing is trained yet
                made.arrive(again, group(order[again - 1]), now=0.0)
    while (chosen := Selection(max_staleness=100).next_batch(made, count=1)) is not None:
        made.take(chosen)
        trained += made.trained(max_staleness=0).group_ids
    assert trained == list(range(8))
    assert made.consumed.watermark == len(order) + 1
