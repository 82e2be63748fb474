"""The account of a run adds up, follows the history of the weights, and detects every kind of loss or duplicate."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages import Trajectory, VersionSpan
from asyncrl.policies.audit.accounting import (
    Account,
    BusFacts,
    HistoryEntry,
    Logged,
    SavedFacts,
    account,
    present,
    steps,
)
from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.staleness.staleness import sampled_spans

BOUND = 2


def span(version: int, *, epoch: int = 0, start: int = 0) -> VersionSpan:
    return VersionSpan(start=start, incarnation=epoch, policy_version=version)


def logged(sequence: int, group_id: int, *versions: int, epoch: int = 0) -> Logged:
    """A trajectory with three sampled tokens of each version."""
    spans = tuple(((span(v, epoch=epoch), 3),) for v in versions or (0,))
    return Logged(sequence=sequence, group_id=group_id, spans=spans)


@dataclass
class Written:
    """A history as a learner writes it; every line has 100 bytes."""

    entries: list[HistoryEntry] = field(default_factory=list)

    @property
    def position(self) -> int:
        return 100 * len(self.entries)

    def begin(self, epoch: int, *, step: int = 0, kept: int = 0, bound: int = BOUND) -> None:
        self._add(kind="begun", incarnation=epoch, step=step, kept=kept, max_staleness=bound)

    def add(
        self, kind: str, *groups: int, step: int, epoch: int = 0, oldest: int = 0, sequences: tuple[int, ...] = ()
    ) -> None:
        self._add(kind=kind, incarnation=epoch, step=step, groups=groups, sequences=sequences, max_staleness=oldest)

    def _add(self, **fields: object) -> None:
        self.entries.append(HistoryEntry(position=self.position, **fields))  # type: ignore[arg-type]


def two_steps() -> Written:
    """Six groups: two steps trained 0 to 3, 4 was dropped, 5 is on the log."""
    written = Written()
    written.begin(0)
    written.add("trained", 1, 0, step=1)
    written.add("dropped", 4, step=1)
    written.add("trained", 2, 3, step=2, oldest=1)
    return written


def saved(written: Written, *, step: int = 2, done: int = 5, next_group_id: int = 6) -> SavedFacts:
    return SavedFacts(
        step=step,
        position=written.position,
        groups=Ledger(watermark=done),
        consumed=Ledger(watermark=done + 1),
        next_group_id=next_group_id,
        outstanding=range(done, next_group_id),
    )


def log_of_six() -> BusFacts:
    return BusFacts(
        prompts=6, queued=(), log=[logged(group_id + 1, group_id) for group_id in range(6)], first=1, last=6
    )


def counted(made: Account, *names: str) -> tuple[int, ...]:
    return tuple(getattr(made, name) for name in names)


def test_every_group_has_one_place() -> None:
    written = two_steps()
    made = account(written.entries, saved=saved(written), bus=log_of_six(), recorded_staleness={(0, 1): 0, (0, 2): 1})
    assert counted(made, "prompts", "published", "trained", "dropped", "pending", "lost") == (6, 6, 4, 1, 1, 0)
    assert counted(made, "max_staleness", "incarnations", "steps", "on_log", "with_metrics") == (1, 1, 2, 4, 2)
    assert (made.is_clean, made.problems) == (True, ())


def test_a_late_second_answer_is_not_taken_for_the_record_that_was_trained() -> None:
    """A worker that was cut off publishes group 1 again, after the trained record was trimmed."""
    written = Written()
    written.begin(0)
    written.add("trained", 0, 1, step=BOUND + 2, sequences=(1, 2), oldest=0)
    late = BusFacts(prompts=2, queued=(), log=[logged(3, 1, 0)], first=3, last=3)
    made = account(written.entries, saved=saved(written, done=2, next_group_id=2), bus=late)
    assert counted(made, "trained", "on_log", "max_staleness", "staleness_violations") == (2, 0, 0, 0)
    assert made.is_clean


@pytest.mark.parametrize(
    ("discard", "left_out", "problems"),
    [
        ("trajectories", 1, []),
        ("trajectories", 0, ["0 trajectories were left out, by the log 1"]),
        ("tokens", 3, []),
        ("tokens", 2, ["2 tokens were left out, by the log 3"]),
        ("groups", 0, ["group 0 was 4 versions old, over 2", "recorded staleness 1, by the log 4"]),
    ],
)
def test_what_was_too_old_alone_is_counted_on_the_log_again(discard: str, left_out: int, problems: list[str]) -> None:
    """Step 5 trains version 4: a trajectory of version 0 is too old, a trajectory of version 3 is not."""
    written = Written()
    written.begin(0)
    written.entries[0] = dataclasses.replace(written.entries[0], settings={"staleness": {"discard": discard}})
    written.add("trained", 0, step=5, oldest=1)
    name = "old_tokens" if discard == "tokens" else "old_trajectories"
    written.entries[1] = dataclasses.replace(written.entries[1], **{name: left_out})
    bus = BusFacts(prompts=1, queued=(), log=[logged(1, 0, 0, 3)], first=1, last=1)
    made = account(written.entries, saved=saved(written, done=1, next_group_id=1), bus=bus)
    assert list(made.problems) == [f"step 5 of incarnation 0: {problem}" for problem in problems]
    assert made.staleness_violations == len(problems)


def test_what_is_trained_again_after_a_kill_is_no_duplicate() -> None:
    """Incarnation 0 trains 0..3 and is killed; its checkpoint is of step 1. Incarnation 1 trains 2 and 3 again."""
    written = Written()
    written.begin(0)
    written.add("trained", 0, 1, step=1)
    at_step_1 = written.position
    written.add("trained", 2, 3, step=2, oldest=1)
    written.begin(1, step=1, kept=at_step_1)
    written.add("trained", 3, 2, step=2, epoch=1, oldest=1)
    made = account(written.entries, saved=saved(written, done=4), bus=log_of_six())
    assert counted(made, "trained", "duplicated", "retrained", "incarnations", "steps") == (4, 0, 2, 2, 2)
    assert made.is_clean
    assert [(entry.incarnation, entry.step) for entry, _, _ in steps(present(written.entries))] == [(0, 1), (1, 2)]


def test_a_life_that_fell_back_behind_another_takes_its_lines_with_it() -> None:
    """Incarnations 1 and 2 start from the checkpoint at step 0; 3 starts from incarnation 2's checkpoint at step 1."""
    written = Written()
    written.begin(0)
    kept = written.position
    written.begin(1, kept=kept)
    written.add("trained", 0, step=1, epoch=1)
    written.begin(2, kept=kept)
    written.add("trained", 1, step=1, epoch=2)
    kept = written.position
    written.add("dropped", 0, step=1, epoch=2)
    written.begin(3, step=1, kept=kept)
    history = present(written.entries)
    assert [(entry.kind, entry.incarnation) for entry in history] == [
        ("begun", 0),
        ("begun", 2),
        ("trained", 2),
        ("begun", 3),
    ]
    assert [resume_points for _, _, resume_points in steps(history)] == [{2: 0}]


SABOTAGE = {
    "trained twice": ("duplicated", "group 0: trained and trained"),
    "trained and dropped": ("duplicated", "group 0: trained and dropped"),
    "a line is missing": ("lost", "group 2: done by the checkpoint's ledger, but no line says how"),
    "the ledger forgot": ("duplicated", "group 4: done, but not by the checkpoint's ledger"),
    "read and forgotten": ("lost", "group 5: its log record counts as read, but it was neither trained nor dropped"),
    "gone": ("lost", "group 6: neither done, nor on the bus, nor outstanding in the checkpoint"),
    "trimmed too far": ("lost", "log record 6: trimmed, and not done by the checkpoint"),
    "too old": ("staleness_violations", "step 2 of incarnation 0: group 3 was 1 versions old, over 0"),
    "too old, trimmed": ("staleness_violations", "step 2 of incarnation 0: trained a group 3 versions old, over 2"),
    "the record lies": ("staleness_violations", "step 2 of incarnation 0: recorded staleness 0, by the log 1"),
    "the metrics differ": ("staleness_violations", "step 2 of incarnation 0: recorded staleness 1, by metrics.jsonl 2"),
}


@pytest.mark.parametrize("how", SABOTAGE)
def test_each_way_of_going_wrong_is_counted_and_named(how: str) -> None:
    written = two_steps()
    checkpoint, bus, metrics = saved(written), log_of_six(), {}
    match how:
        case "trained twice":
            written.add("trained", 0, step=3, oldest=2)
        case "trained and dropped":
            written.add("dropped", 0, step=2)
        case "a line is missing":
            written.entries[3] = dataclasses.replace(written.entries[3], groups=(3,))
        case "the ledger forgot":
            checkpoint = saved(written, done=4)
        case "read and forgotten":
            checkpoint.consumed.add(6)
        case "gone":
            checkpoint = dataclasses.replace(checkpoint, next_group_id=7)
        case "trimmed too far":
            bus = dataclasses.replace(bus, log=(), first=7)
        case "too old":
            written.entries = [dataclasses.replace(entry, max_staleness=0) for entry in written.entries]
        case "too old, trimmed":
            written.entries[3] = dataclasses.replace(written.entries[3], max_staleness=3)
            bus = dataclasses.replace(bus, log=bus.log[5:], first=6)
        case "the record lies":
            written.entries[3] = dataclasses.replace(written.entries[3], max_staleness=0)
        case "the metrics differ":
            metrics = {(0, 2): 2}
    made = account(written.entries, saved=checkpoint, bus=bus, recorded_staleness=metrics)
    number, problem = SABOTAGE[how]
    assert not made.is_clean
    assert getattr(made, number) >= 1
    assert problem in made.problems


def test_a_run_whose_bus_is_gone_is_counted_by_the_checkpoint_and_the_record() -> None:
    written = two_steps()
    made = account(written.entries, saved=saved(written), bus=None)
    assert counted(made, "prompts", "trained", "pending", "lost", "on_log") == (6, 4, 1, 0, 0)
    assert made.max_staleness == 1


def test_before_the_first_checkpoint_everything_is_made_again() -> None:
    made = account([], saved=None, bus=BusFacts(prompts=4, queued={0, 3}, log=[logged(1, 2)], first=1, last=1))
    assert counted(made, "prompts", "published", "pending", "lost", "incarnations") == (4, 1, 4, 0, 0)


def test_only_tokens_that_the_policy_sampled_have_an_age() -> None:
    trajectory = Trajectory(
        tokens=[7, 7, 7, 7],
        response_mask=[False, False, True, True],
        behavior_logprobs=[0.0, 0.0, -1.0, -1.0],
        version_spans=(span(0), span(1, start=1), span(2, start=3)),
    )
    assert [(s.policy_version, count) for s, count in sampled_spans(trajectory)] == [(1, 1), (2, 1)]


def oldest(one: Logged, *, step: int, resume_points: dict[int, int]) -> int:
    return one.trained(step=step, resume_points=resume_points, discard="groups", bound=0)[0]


def test_rolled_back_versions_count_as_old_as_the_resume_point() -> None:
    """Incarnation 1 kept version 6 of incarnation 0, so version 9 counts as 6. Step 8 trains version 7: 1 old."""
    assert oldest(logged(1, 0, 9), step=8, resume_points={1: 6}) == 1


class Life:
    """A learner that takes random groups from a log, is killed at random, and follows the rules."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.written = chance, Written()
        self.log: list[Logged] = []
        self.queued: set[int] = set()
        self.next = 0
        self.checkpoint: SavedFacts | None = None
        self.epoch, self.trimmed = -1, 0
        self.resume()

    def resume(self) -> None:
        found = self.checkpoint
        self.epoch += 1
        self.step = found.step if found else 0
        self.groups = Ledger.from_json(found.groups.as_json()) if found else Ledger()
        self.consumed = Ledger.from_json(found.consumed.as_json()) if found else Ledger(watermark=1)
        self.written.begin(self.epoch, step=self.step, kept=found.position if found else 0)
        lives = [entry for entry in present(self.written.entries) if entry.kind == "begun"]
        self.resume_points = {life.incarnation: life.step for life in lives if life.incarnation > 0}

    def do(self, what: str) -> None:
        if what == "publish":
            self.queued.add(self.next)
            self.next += 1
        elif what == "answer" and self.queued:
            group_id = self.chance.choice(sorted(self.queued))
            self.queued.remove(group_id)
            self.log.append(logged(len(self.log) + self.trimmed + 1, group_id, self.step, epoch=self.epoch))
        elif what in ("train", "fail"):
            ready = [r for r in self.log if r.sequence not in self.consumed and r.group_id not in self.groups]
            young = [r for r in ready if oldest(r, step=self.step + 1, resume_points=self.resume_points) <= BOUND]
            for record in [r for r in ready if r not in young]:
                self.dispose(record)
                self.written.add("dropped", record.group_id, step=self.step, epoch=self.epoch)
            taken = self.chance.sample(young, k=min(len(young), 2))
            if what == "fail":
                taken = taken[:1]
            for record in taken:
                self.dispose(record)
            if taken and what == "fail":
                self.written.add("failed", taken[0].group_id, step=self.step, epoch=self.epoch)
            elif taken:
                self.step += 1
                age = max(oldest(record, step=self.step, resume_points=self.resume_points) for record in taken)
                ids = [record.group_id for record in taken]
                self.written.add("trained", *ids, step=self.step, epoch=self.epoch, oldest=age)
        elif what == "save":
            self.checkpoint = self.saved()
        elif what == "trim" and self.checkpoint is not None:
            gone = [r for r in self.log if r.sequence < self.checkpoint.consumed.watermark]
            self.log, self.trimmed = self.log[len(gone) :], self.trimmed + len(gone)
        elif what == "kill":
            self.resume()

    def dispose(self, record: Logged) -> None:
        self.groups.add(record.group_id)
        self.consumed.add(record.sequence)

    def saved(self) -> SavedFacts:
        return SavedFacts(
            step=self.step,
            position=self.written.position,
            groups=Ledger.from_json(self.groups.as_json()),
            consumed=Ledger.from_json(self.consumed.as_json()),
            next_group_id=self.next,
            outstanding={i for i in range(self.next) if i not in self.groups},
        )

    def account(self) -> Account:
        bus = BusFacts(
            prompts=self.next,
            queued=self.queued,
            log=self.log,
            first=self.trimmed + 1,
            last=self.trimmed + len(self.log),
        )
        return account(self.written.entries, saved=self.checkpoint, bus=bus)


WHAT = ["publish"] * 3 + ["answer"] * 3 + ["train"] * 2 + ["fail", "save", "trim", "kill"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(WHAT), max_size=60), st.randoms(use_true_random=False))
def test_a_learner_that_keeps_its_rules_is_clean_whenever_it_is_killed_and_looked_at(
    moves: list[str], chance: random.Random
) -> None:
    life = Life(chance)
    for what in moves:
        life.do(what)
    made = life.account()
    assert made.problems == ()
    assert made.prompts == made.trained + made.dropped + made.failed + made.filtered + made.pending
    assert made.max_staleness <= BOUND
    kept = [e for e in present(life.written.entries) if e.kind == "trained"]
    assert made.trained == sum(len(e.groups) for e in kept)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(WHAT), max_size=60), st.randoms(use_true_random=False))
def test_a_group_that_a_learner_trains_twice_is_always_found(moves: list[str], chance: random.Random) -> None:
    life = Life(chance)
    for what in [*moves, "publish", "answer", "train", "train"]:
        life.do(what)
    trained = [e for e in present(life.written.entries) if e.kind == "trained"]
    if trained:
        life.written.add("trained", trained[0].groups[0], step=life.step + 1, epoch=life.epoch)
        assert life.account().duplicated == 1
