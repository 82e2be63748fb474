"""The group table under random sequences of events: no sequence loses a group or does a group twice.

test_table.py tests one event at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.states import FATES, Outcome
from asyncrl.policies.groups.table import GroupTable
from tests.harness.groups import group
from tests.unit.policies.groups.test_table import table

MALFORMED = "rejected by the validator"


@dataclass
class World:
    """State outside the table that outlives a learner: prompts on the bus, the trajectory log, and the run's folder.

    log          group ids with their errors or MALFORMED; ``times_lost`` counts how often the log was lost or went back
    first        sequence of the log's first entry; ``gone`` has the earlier sequences that the learner did not trim
    turned_down  sequences of the log that were rejected when they were read
    history      lines as (fate, group ids); each checkpoint records their number
    checkpoints  the newest last; falling back to one loses those after it. ``may_fall_back``: the newest is on disk,
                 so the log still has what the one before needs
    """

    published: int = 0
    log: list[tuple[int, str]] = field(default_factory=list)
    times_lost: int = 0
    first: int = 1
    gone: set[int] = field(default_factory=set)
    turned_down: set[int] = field(default_factory=set)
    history: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    checkpoints: list[LearnerState] = field(default_factory=list)
    may_fall_back: bool = False

    def unread(self, cursor: int) -> int:
        """Return the first entry after ``cursor``, or 0 if there is none."""
        sequence = max(cursor + 1, self.first)
        return sequence if sequence <= len(self.log) else 0


class Run:
    """A run of any number of incarnations, killed at any point, with a log that repeats entries.

    The learner reads the log in order from the cursor. All other events happen in random order, drawn from ``dice``.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.world = World()
        self.table = table()
        self.rule = Selection(max_staleness=2)
        self.happened: Counter[str] = Counter()
        self.unwritten: LearnerState | None = None  # checkpoint being written
        self.find_log()
        self.publish()

    def go_on(self) -> None:
        """Perform one event that is possible now."""
        table, learner = self.table, {self.save: 3, self.publish: 6, self.answer: 8}
        learner |= {self.read: 8} if self.world.unread(table.cursor) else {}
        learner |= {self.fail: 1, self.publish_again: 2} if table.outstanding else {}
        learner |= {self.leave_out: 2} if table.buffered else {}
        learner |= {self.take: 8} if table.buffered and not table.training else {}
        learner |= {self.end_step: 6} if table.training else {}
        learner |= {self.trim: 6} if self.unwritten is not None else {}
        learner |= {self.measure: 2, self.trust_nobody: 0.5}
        killed = {self.crash: 1} if self.world.checkpoints else {self.crash_before_any_checkpoint: 0.5}
        events = learner | killed | {self.lose_the_bus: 0.3, self.go_back: 0.5, self.lose_unread: 0.7}
        (event,) = self.dice.choices(list(events), list(events.values()))
        self.happened[event.__name__] += 1
        event()

    # -- events outside the learner ------------------------------------------------------------------------------------

    def publish(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            group_id = self.table.next_group_id
            self.table.publish(group_id, position=group_id, oldest_start=self.table.step)
        self.world.published = max(self.world.published, self.table.next_group_id)

    def publish_again(self) -> None:
        """The bus loses a prompt, and the learner publishes it again."""
        group_id = self.dice.choice(sorted(self.table.outstanding))
        self.table.publish(group_id, position=self.table.outstanding[group_id].position)

    def answer(self) -> None:
        """Workers answer groups: requested groups, other groups, perhaps a group that was never requested."""
        for _ in range(self.dice.randint(1, 4)):
            asked_for = sorted(self.table.outstanding)
            group_id = self.dice.randint(0, self.world.published)
            if asked_for and self.dice.random() < 0.7:
                group_id = self.dice.choice(asked_for)
            error = self.dice.choices(["", "reward raised", MALFORMED], [6, 2, 1])[0]
            self.world.log.append((group_id, error))

    # -- events of the learner -----------------------------------------------------------------------------------------

    def read(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            if sequence := self.world.unread(self.table.cursor):
                self.read_one(sequence)

    def read_one(self, sequence: int) -> None:
        """Read one entry. The validator rejects some entries; their groups stay outstanding."""
        assert set(self.table.skip(sequence)) <= self.world.gone, "trimmed, and not read"
        group_id, error = self.world.log[sequence - 1]
        made = group(group_id, version=max(0, self.table.step - group_id % 3), error=error)
        arrival = self.table.arrive(sequence, None if error == MALFORMED else made, now=0.0)
        assert (arrival.outcome is not None) == (arrival.became == "failed")
        self.tell(arrival.outcome)
        if arrival.became == "rejected":
            self.world.turned_down.add(sequence)

    def fail(self) -> None:
        """A group fails because its place in the log is taken."""
        self.tell(self.table.fail(self.dice.choice(sorted(self.table.outstanding)), error="its place is taken"))

    def leave_out(self) -> None:
        """A filter removes a group, a step fails with a group, or a worker is quarantined."""
        group_ids = sorted(self.table.buffered)
        how = self.dice.choice(["filter", "reject", "drop"])
        if how == "filter":
            self.tell(self.table.filter(self.dice.choice(group_ids)))
        elif how == "reject":
            self.tell(self.table.fail_buffered(self.dice.choice(group_ids), error="a step with it fails"))
        else:
            chosen = self.dice.sample(group_ids, self.dice.randint(1, len(group_ids)))
            self.tell(self.table.drop([self.table.buffered[one] for one in chosen], reason="quarantined"))

    def take(self) -> None:
        if stale := self.rule.stale(self.table):
            self.tell(self.table.drop(stale))
        if (chosen := self.rule.next_batch(self.table, count=self.dice.randint(1, 3))) is not None:
            self.table.take(chosen)

    def end_step(self) -> None:
        ages = [self.table.step - one.oldest_version for one in self.table.training.values()]
        assert max(ages) <= 2
        if self.dice.random() < 0.3:
            self.table.put_back()
        else:
            self.tell(self.table.trained(max_staleness=max(ages)))

    def save(self) -> None:
        self.world.checkpoints.append(saved_table.save(self.table, groups_per_batch=2, history=len(self.world.history)))
        self.unwritten = self.world.checkpoints[-1]

    def trim(self) -> None:
        """The checkpoint is on disk: trim the log up to the first entry that it or the previous one needs."""
        assert self.unwritten is not None
        state, self.unwritten = self.unwritten, None
        self.world.first = max(self.world.first, self.table.checkpointed(state) + 1)
        self.world.may_fall_back = True

    def measure(self) -> None:
        self.table.take_lengths()
        assert self.table.take_lengths() == ([], [])

    def trust_nobody(self) -> None:
        self.table.excuse_failures()
        assert self.table.failed_in_a_row == 0
        self.table.begin_anew()
        assert self.table.lost_since_step("failed") == self.table.lost_since_step("filtered") == 0

    # -- kills ---------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The learner is killed and resumes from the newest or the previous checkpoint; the rest is rolled back.

        A checkpoint that was still being written does not exist.
        """
        if len(self.world.checkpoints) > 1:
            if self.unwritten is not None:
                self.world.checkpoints.pop()
            elif self.world.may_fall_back and self.dice.random() < 0.5:
                self.world.checkpoints.pop()
                self.world.may_fall_back = False
        self.unwritten = None
        state = self.world.checkpoints[-1]
        del self.world.history[state.history :]
        self.table = saved_table.restore(state)
        assert saved_table.save(self.table, groups_per_batch=2, history=state.history) == state
        self.find_log()
        self.catch_up()

    def crash_before_any_checkpoint(self) -> None:
        self.world.history.clear()
        self.table, self.unwritten = table(), None
        self.find_log()
        self.catch_up()

    def lose_the_bus(self) -> None:
        """The learner is resumed and finds a new, empty log; the groups of the old log must be generated again."""
        self.lose_log(kept=0)

    def go_back(self) -> None:
        """The server loses power: the log loses its last records, and the resumed learner reads it again."""
        self.lose_log(kept=self.dice.randint(self.world.first - 1, len(self.world.log)))

    def lose_unread(self) -> None:
        """The oldest entries of the log are deleted by another process, whether or not they were read."""
        first, self.world.first = self.world.first, self.dice.randint(self.world.first, len(self.world.log) + 1)
        self.world.gone |= set(range(first, self.world.first))

    def lose_log(self, *, kept: int) -> None:
        """The run ends, and is resumed with a log that has only its first ``kept`` entries."""
        state = saved_table.save(self.table, groups_per_batch=2, history=len(self.world.history))
        self.table, self.unwritten = saved_table.restore(state), None
        del self.world.log[kept:]
        self.world.first = self.world.first if kept else 1
        self.world.gone = set(range(1, self.world.first))
        self.world.times_lost += 1
        self.world.may_fall_back = False
        self.world.turned_down.clear()
        self.find_log()

    def find_log(self) -> None:
        """The reader compares the log with the log that the table knows."""
        identity = str(self.world.times_lost)
        if self.table.log not in ("", identity):
            self.table.start_new_log(first=self.world.first)
        self.table.follow_log(identity)

    def catch_up(self) -> None:
        """The prompt source finds the prompts that were published after the checkpoint on the bus."""
        for group_id in range(self.table.next_group_id, self.world.published):
            self.table.publish(group_id, position=group_id)

    def tell(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.world.history.append((outcome.fate, outcome.group_ids))

    def finish(self) -> None:
        """After one more kill, the learner reads the log to its end; no group with an entry there stays outstanding."""
        self.save()
        self.table = saved_table.restore(self.world.checkpoints[-1])
        there = {
            one
            for sequence, (one, error) in enumerate(self.world.log, start=1)
            if error != MALFORMED and sequence not in self.world.turned_down and sequence >= self.world.first
        }
        while sequence := self.world.unread(self.table.cursor):
            self.read_one(sequence)
        assert there.isdisjoint(self.table.outstanding)

    # -- invariants ----------------------------------------------------------------------------------------------------

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
        """After a kill at this moment, every answer that is not done is in the log after the saved ledger.

        Exceptions are answers whose record was lost with a log: their groups are requested again.
        """
        for one in (*self.table.buffered.values(), *self.table.training.values()):
            if one.sequence == 0 or one.sequence in self.world.gone:
                continue
            assert one.sequence >= self.world.first
            assert one.sequence not in self.table.consumed
            assert self.world.log[one.sequence - 1][0] == one.group_id

    def what_is_saved_is_everything_but_what_the_log_brings_back(self) -> None:
        saved = saved_table.save(self.table, groups_per_batch=2, history=0).prompts
        waiting = self.table.outstanding.keys() | self.table.buffered.keys() | self.table.training.keys()
        assert saved.outstanding.keys() == waiting
        assert saved.next_group_id == self.table.next_group_id


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), events=st.integers(50, 100))
def test_no_sequence_of_events_loses_a_group_or_does_it_twice(seed: int, events: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(events):
        run.go_on()
        run.check()
    run.finish()
    run.check()


def test_such_a_sequence_has_every_event_many_times() -> None:
    """Otherwise the sequences would test little."""
    happened = Counter[str]()
    for seed in range(25):
        run = Run(random.Random(seed))
        for _ in range(75):
            run.go_on()
        happened += run.happened
    assert min(happened[event] for event in ("crash", "lose_the_bus", "go_back", "lose_unread", "trust_nobody")) >= 10
    assert min(happened[event] for event in ("take", "end_step", "leave_out", "fail", "read", "save", "trim")) >= 25


def test_such_sequences_reach_every_event_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except the end of the data, after which nothing is published."""
    questions = {"is_published", "asked", "awaits", "lost_since_step", "describe", "save", "restore"}
    events = {
        name for name, found in vars(GroupTable).items() if callable(found) and not name.startswith("_")
    } - questions
    reached = set[str]()

    def noting(name: str) -> Callable[..., Any]:
        event = vars(GroupTable)[name]

        def call(*arguments: Any, **named: Any) -> Any:
            reached.add(name)
            return event(*arguments, **named)

        return call

    for name in events:
        monkeypatch.setattr(GroupTable, name, noting(name))
    for seed in range(10):
        run = Run(random.Random(seed))
        for _ in range(75):
            run.go_on()
    assert events - reached == {"exhaust"}


@settings(max_examples=100)
@given(st.lists(st.integers(0, 7), min_size=8, max_size=30))
def test_every_group_that_the_log_brings_is_done_after_enough_steps(order: list[int]) -> None:
    """In any order, with any repetitions, and with a kill halfway."""
    order = [*order, *range(8)]
    made, trained = table(8), list[int]()
    state = saved_table.save(made, groups_per_batch=1, history=0)
    for sequence, group_id in enumerate(order, start=1):
        made.arrive(sequence, group(group_id), now=0.0)
        if sequence == len(order) // 2:
            state = saved_table.save(made, groups_per_batch=1, history=0)
            made = saved_table.restore(state)
            for again in range(1, sequence + 1):  # from the cursor at the beginning: nothing is trained yet
                made.arrive(again, group(order[again - 1]), now=0.0)
    while (chosen := Selection(max_staleness=100).next_batch(made, count=1)) is not None:
        made.take(chosen)
        trained += made.trained(max_staleness=0).group_ids
    assert trained == list(range(8))
    assert made.consumed.watermark == len(order) + 1
