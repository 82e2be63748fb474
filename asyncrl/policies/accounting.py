"""What became of every prompt group of a run, worked out from what the run left behind; and whether that adds up.

Three witnesses are compared, of which none is made from another:

  history     a line for every group that left the window, written by the learner at that instant (asyncrl/history.py)
  checkpoint  the ledgers and the prompt position that a resumed learner goes on from
  bus         prompts that wait or are on loan, and the trajectory log with the versions that sampled each token

**The history that counts is the one the weights have.** A learner that is killed after step n and resumed from the
checkpoint of step k < n has weights that never saw steps k + 1 to n: their groups are trained again, and that is no
duplicate. Each life of the learner begins with a line that says how far the file went when its checkpoint was made;
what lies between is a lost history (``present``).

Of n groups, with ids 0 to n - 1 (the docstring of ``Account`` says what each number means):

    prompts = trained + dropped + buried + filtered + pending + lost        when nothing is duplicated

Tests: tests/test_accounting.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.messages import Trajectory, VersionSpan
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.staleness import Forks, oldest_version

BEGUN: Final = "begun"
FATES: Final = ("trained", "dropped", "buried", "filtered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the history, in the order written.

    kind           "begun": a life of the learner; or one of FATES
    step           of "trained" the step's number, else how many steps were done
    position       bytes of the file before this line
    groups         ids that met this fate, in the order of the batch
    max_staleness  of "trained" the oldest sampled token of the batch; of "begun" the bound of this life
    kept           of "begun": what lies at this position and beyond is not in the history of the weights
    settings       of "begun": the run file (config/record.py)
    """

    kind: str
    run_epoch: int
    step: int
    position: int
    groups: tuple[int, ...] = ()
    max_staleness: int = 0
    kept: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def present(entries: Sequence[Entry]) -> list[Entry]:
    """The history that the newest weights have: without what learners lost that fell back to a checkpoint."""
    history: list[Entry] = []
    for entry in entries:
        if entry.kind == BEGUN:
            while history and history[-1].position >= entry.kept:
                history.pop()
        history.append(entry)
    return history


def steps(history: Sequence[Entry]) -> Iterator[tuple[Entry, Entry, Forks]]:
    """Each trained step of a present history, with the line that began its life and the forks as that life saw them."""
    forks: dict[int, int] = {}
    for entry in history:
        if entry.kind == BEGUN:
            life = entry
            if entry.run_epoch > 0:
                forks = forks | {entry.run_epoch: entry.step}
        elif entry.kind == "trained":
            yield entry, life, forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One group on the trajectory log. spans: of each trajectory, those with sampled tokens."""

    sequence: int
    group_id: int
    spans: tuple[tuple[VersionSpan, ...], ...] = ()

    def staleness(self, *, step: int, forks: Forks) -> int:
        """Of the oldest token, when ``step`` trains it."""
        return max([0, *(step - 1 - oldest_version(spans, forks) for spans in self.spans)])


def sampled_spans(trajectory: Trajectory) -> tuple[VersionSpan, ...]:
    """The version spans of tokens that the policy sampled."""
    spans = trajectory.version_spans
    ends = [span.start for span in spans[1:]] + [len(trajectory.tokens)]
    mask = trajectory.response_mask
    return tuple(span for span, end in zip(spans, ends, strict=True) if mask[span.start : end].any())


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFacts:
    """What the bus holds.

    prompts      how many prompts were ever published on it, those included that were published again
    queued, log  groups that wait or are on loan as prompts; records of the trajectory log
    first, last  sequence of the oldest record that is kept, and of the newest ever published
    """

    prompts: int
    queued: Collection[int]
    log: Sequence[Logged]
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFacts:
    """What the newest checkpoint says. outstanding: ids published and not disposed of; position: in the history."""

    step: int
    position: int
    groups: Ledger
    consumed: Ledger
    next_group_id: int
    outstanding: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """prompts               prompt groups that were published; ids are dense, so the largest one says how many
    published             of these, came back from a worker: they met a fate, or lie on the log
    trained               trained by a step in the history of the newest weights
    dropped               arrived too old to be trained (staleness)
    buried                could not be made: engine, reward or rollout function failed for good
    filtered              nothing to learn from (algorithm.filters)
    pending               not done yet and not lost: waiting or on loan as a prompt, waiting on the log, or published
                          again by the next ``--resume`` because the checkpoint says they are outstanding
    lost                  neither done nor pending: nobody will ever train them; also what the checkpoint's ledger
                          calls done without a line in the history that says how, and records trimmed from the log
                          before a checkpoint that has them done
    duplicated            met two fates in one history, or met one that the checkpoint does not know of, so that a
                          resumed learner would train them again
    max_staleness         versions between sampling and training of the oldest trained token
    staleness_violations  trained groups with a token over the bound of their life; and steps whose recorded staleness
                          is not that of their groups on the log, or not that in metrics.jsonl
    epochs                lives of the learner, those included of which no step is left
    retrained             trained in a lost history and again in this one: a kill, not a duplicate
    foreign               log records of groups that this run never published: somebody else's, refused or ignored
    steps, bound          optimizer steps of this history; largest bound of its lives
    on_log, with_metrics  trained groups whose staleness was worked out anew from the log; steps compared with their
                          row in metrics.jsonl
    problems              a sentence for every number that should be 0 and is not
    """

    prompts: int
    published: int
    trained: int
    dropped: int
    buried: int
    filtered: int
    pending: int
    lost: int
    duplicated: int
    max_staleness: int
    staleness_violations: int
    epochs: int
    retrained: int
    foreign: int
    steps: int
    bound: int
    on_log: int
    with_metrics: int
    problems: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return self.lost == self.duplicated == self.staleness_violations == 0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"clean": self.is_clean}


def account(
    entries: Sequence[Entry],
    *,
    saved: SavedFacts | None,
    bus: BusFacts | None,
    recorded_staleness: Mapping[tuple[int, int], int] | None = None,
) -> Account:
    """The account of a run. ``saved``: None before the first checkpoint; ``bus``: None when it is gone (memory store).

    ``recorded_staleness``: (run epoch, step) -> staleness/max in metrics.jsonl.
    """
    history = present(entries)
    fates: dict[int, list[str]] = {}
    for entry in history:
        for group_id in entry.groups:
            fates.setdefault(group_id, []).append(entry.kind)
    next_group_id = saved.next_group_id if saved else 0
    bound = next_group_id + (bus.prompts + bus.last if bus else 0)  # ids are dense: nobody published a larger one
    log = [record for record in bus.log if record.group_id < bound] if bus else []
    queued = frozenset(() if bus is None else bus.queued)
    logged = {record.group_id for record in log}
    seen = fates.keys() | queued | logged | set(range(next_group_id))
    prompts = max(seen, default=-1) + 1
    consumed = _consumed(saved, bus)
    unread = {record.group_id for record in log if record.sequence not in consumed}

    problems: list[str] = []
    lost, pending = set(), prompts - len(seen)  # who goes on behind the checkpoint publishes what is missing
    for group_id in sorted(seen):
        if group_id in fates or (saved is not None and group_id in saved.groups):
            continue
        if group_id in queued or group_id in unread:
            pending += 1
        elif group_id in logged:
            lost.add(group_id)
            problems.append(f"group {group_id}: its log record counts as read, and nothing became of it")
        elif saved is None or group_id >= saved.next_group_id or group_id in saved.outstanding:
            pending += 1
        else:
            lost.add(group_id)
            problems.append(f"group {group_id}: neither done, nor on the bus, nor outstanding in the checkpoint")
    duplicated = {group_id for group_id, kinds in fates.items() if len(kinds) > 1}
    problems += [f"group {group_id}: {' and '.join(fates[group_id])}" for group_id in sorted(duplicated)]

    if saved is not None:
        done = {group_id for entry in history if entry.position < saved.position for group_id in entry.groups}
        unrecorded = {i for i in (*range(saved.groups.watermark), *saved.groups.beyond) if i not in done}
        problems += [f"group {i}: done by the checkpoint's ledger, but no line says how" for i in sorted(unrecorded)]
        unsaved = {group_id for group_id in done if group_id not in saved.groups}
        problems += [f"group {i}: done, but not by the checkpoint's ledger" for i in sorted(unsaved)]
        lost |= unrecorded
        duplicated |= unsaved
    trimmed = [s for s in range(consumed.watermark, bus.first) if s not in consumed] if bus and saved else []
    problems += [f"log record {s}: trimmed, and not done by the checkpoint" for s in trimmed]

    ages = _ages(history, {record.group_id: record for record in reversed(log)}, recorded_staleness or {})
    counts = {fate: sum(1 for kinds in fates.values() if fate in kinds) for fate in FATES}
    kept = {entry.position for entry in history}
    again = {i for entry in entries if entry.kind == "trained" and entry.position not in kept for i in entry.groups}
    lives = [entry for entry in history if entry.kind == BEGUN]
    return Account(
        prompts=prompts,
        published=len(fates.keys() | logged),
        **counts,
        pending=pending,
        lost=len(lost) + len(trimmed),
        duplicated=len(duplicated),
        max_staleness=ages.largest,
        staleness_violations=len(ages.problems),
        epochs=sum(entry.kind == BEGUN for entry in entries),
        retrained=sum("trained" in fates.get(group_id, ()) for group_id in again),
        foreign=0 if bus is None else len(bus.log) - len(log),
        steps=sum(entry.kind == "trained" for entry in history),
        bound=max((life.max_staleness for life in lives), default=0),
        on_log=ages.on_log,
        with_metrics=ages.with_metrics,
        problems=(*problems, *ages.problems),
    )


def _consumed(saved: SavedFacts | None, bus: BusFacts | None) -> Ledger:
    """Log sequences that a resumed learner skips. A log shorter than the cursor is a new one, which it reads whole."""
    if saved is None or (bus is not None and bus.last < saved.consumed.watermark - 1):
        return Ledger(watermark=1)
    return saved.consumed


@dataclass(slots=True)
class _Ages:
    largest: int = 0
    on_log: int = 0
    with_metrics: int = 0
    problems: list[str] = field(default_factory=list)


def _ages(
    history: Sequence[Entry], log: Mapping[int, Logged], recorded_staleness: Mapping[tuple[int, int], int]
) -> _Ages:
    """The staleness of every trained group: from the log where it still has them, else as the step recorded it."""
    found = _Ages()
    for entry, life, forks in steps(history):
        ages = {i: log[i].staleness(step=entry.step, forks=forks) for i in entry.groups if i in log}
        found.on_log += len(ages)
        found.largest = max(found.largest, entry.max_staleness, *ages.values())
        bound, name = life.max_staleness, f"step {entry.step} of epoch {entry.run_epoch}"
        found.problems += [
            f"{name}: group {i} was {age} versions old, over {bound}" for i, age in ages.items() if age > bound
        ]
        if len(ages) == len(entry.groups):
            if max(ages.values(), default=0) != entry.max_staleness:
                found.problems.append(
                    f"{name}: recorded staleness {entry.max_staleness}, by the log {max(ages.values(), default=0)}"
                )
        elif entry.max_staleness > bound:
            found.problems.append(f"{name}: trained a group {entry.max_staleness} versions old, over {bound}")
        measured = recorded_staleness.get((entry.run_epoch, entry.step))
        found.with_metrics += measured is not None
        if measured is not None and measured != entry.max_staleness:
            found.problems.append(f"{name}: recorded staleness {entry.max_staleness}, by metrics.jsonl {measured}")
    return found
