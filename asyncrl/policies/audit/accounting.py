"""Account for every prompt group of a run from the records it left, and check that the records agree.

Three independent records are compared:

  history     a line for each group that left the window, written by the learner at that moment
              (asyncrl/actors/learner/history.py)
  checkpoint  the ledgers and the prompt position from which a resumed learner continues
  bus         prompts that wait or are in flight, and the trajectory log with the versions that sampled each token

Only the history of the newest weights counts (``entries.present``).

For n groups with ids 0 to n - 1, if nothing is duplicated (the docstring of ``Account`` explains each number):

    prompts = trained + dropped + failed + filtered + pending + lost + unrecorded

Tests: tests/unit/policies/audit/test_accounting.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.staleness import Discard
from asyncrl.messages import VersionSpan
from asyncrl.policies.audit.entries import BEGUN, FATES, HistoryEntry, damage, due_checkpoint, present, steps
from asyncrl.policies.audit.evaluations import EvaluationAccount
from asyncrl.policies.groups.ledger import Ledger
from asyncrl.policies.staleness.staleness import ResumePoints, effective_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One group on the trajectory log.  spans: per trajectory, its version spans with the number of sampled tokens"""

    sequence: int
    group_id: int
    spans: tuple[tuple[tuple[VersionSpan, int], ...], ...] = ()

    def trained(self, *, step: int, resume_points: ResumePoints, discard: Discard, bound: int) -> tuple[int, int]:
        """Return the staleness, at least 0, of the oldest token that counts when ``step`` trains the group, and the
        number of trajectories (``discard`` "trajectories") or tokens ("tokens") that are left out."""
        ages = [[(step - 1 - effective_version(span, resume_points), count) for span, count in of] for of in self.spans]
        left_out = 0
        if discard == "trajectories":
            young = [of for of in ages if max(of)[0] <= bound]
            left_out, ages = len(ages) - len(young), young
        elif discard == "tokens":
            left_out = sum(count for of in ages for age, count in of if age > bound)
            ages = [[(age, count) for age, count in of if age <= bound] for of in ages]
        return max([0, *(age for of in ages for age, _ in of)]), left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFacts:
    """What the bus holds.

    prompts      number of prompts ever published on it, including republished ones
    queued, log  ids of groups whose prompts wait or are in flight; records of the trajectory log
    first, last  sequence of the oldest record that is kept, and of the newest ever published
    """

    prompts: int
    queued: Collection[int]
    log: Sequence[Logged]
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFacts:
    """The newest checkpoint.  position: bytes of history at that time;  outstanding: ids published and not done"""

    step: int
    position: int
    groups: Ledger
    consumed: Ledger
    next_group_id: int
    outstanding: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of a run.

    prompts               prompt groups that were published; ids are dense, so the largest id gives the count
    published             groups that came back from a worker: they met a fate or are on the log
    trained               trained by a step in the history of the newest weights
    dropped               arrived too old to be trained (staleness)
    failed                could not be made: engine, reward or rollout function failed for good
    filtered              nothing to learn from (algorithm.filters)
    pending               neither done nor lost: the prompt waits or is in flight, the group waits on the log, or the
                          next ``--resume`` publishes it again: outstanding in the checkpoint, or newer than it
    lost                  neither done nor pending, so never trained; also groups done by the checkpoint's ledger
                          without a line in the history, and log records trimmed before a checkpoint had them done
    unrecorded            done by the checkpoint's ledger without a line in a damaged history: trained, dropped, failed
                          or filtered, but the record does not say which
    duplicated            met two fates in one history, or a fate that the checkpoint does not know of (a resumed
                          learner would train them again)
    max_staleness         versions between sampling and training of the oldest trained token
    staleness_violations  trained groups with a token over the bound of their incarnation, and steps whose recorded
                          staleness differs from that of their groups on the log or from metrics.jsonl
    incarnations          starts of the learner, including those of which no step is left
    retrained             trained by a rolled-back step and again after it; not duplicates
    foreign               log records of groups that this run never published; the learner rejects or ignores them
    steps, bound          optimizer steps of this history; largest staleness bound of its incarnations
    on_log, with_metrics  trained groups whose staleness was recomputed from the log; steps that were compared with
                          their row in metrics.jsonl
    problems              a sentence for each number that should be 0 and is not
    damage                a sentence for each part of the record that cannot be read
    damaged_places        damaged places of the history, plus 1 if no checkpoint can be read; more groups may be missing
                          there than are counted as unrecorded
    bus_not_asked         why the bus was not asked, so the account lacks prompts and log; empty if it was asked
    evaluations           results of evaluations in metrics.jsonl, and how many of them are incomplete
    evaluation_answers    records of the newest evaluation on the bus, each with the answers to one prompt, and how many
                          of them mix versions and count in no result
    evaluation_problems   results that differ from their answers, and evaluation groups on the trajectory log
    """

    prompts: int
    published: int
    trained: int
    dropped: int
    failed: int
    filtered: int
    pending: int
    lost: int
    unrecorded: int
    duplicated: int
    max_staleness: int
    staleness_violations: int
    incarnations: int
    retrained: int
    foreign: int
    steps: int
    bound: int
    on_log: int
    with_metrics: int
    problems: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    damaged_places: int = 0
    bus_not_asked: str = ""
    evaluations: int = 0
    evaluations_incomplete: int = 0
    evaluation_answers: int = 0
    evaluation_mixed: int = 0
    evaluation_problems: int = 0

    @property
    def is_clean(self) -> bool:
        return self.has_no_fault and not self.unrecorded and not self.damaged_places

    @property
    def has_no_fault(self) -> bool:
        """Whether no problem was found in the parts of the record that can be read."""
        return self.lost == self.duplicated == self.staleness_violations == self.evaluation_problems == 0

    def with_evaluations(self, found: EvaluationAccount) -> Account:
        return dataclasses.replace(
            self,
            evaluations=found.evaluations,
            evaluations_incomplete=found.incomplete,
            evaluation_answers=found.answers,
            evaluation_mixed=found.mixed,
            evaluation_problems=len(found.problems),
            problems=(*self.problems, *found.problems),
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"clean": self.is_clean}


def account(
    entries: Sequence[HistoryEntry],
    *,
    saved: SavedFacts | None,
    bus: BusFacts | None,
    recorded_staleness: Mapping[tuple[int, int], int] | None = None,
    size: int | None = None,
    damage_elsewhere: Sequence[str] = (),
    is_history_gone: bool = False,
    bus_not_asked: str = "",
) -> Account:
    """Return the account of a run. ``saved`` is None before the first checkpoint, ``bus`` is None if it was not asked.

    recorded_staleness  (incarnation, step) -> staleness/max in metrics.jsonl
    size                length of the history's file in bytes
    damage_elsewhere    sentences on unreadable records other than the history
    is_history_gone     ``entries`` is empty although a learner has written some
    bus_not_asked       why ``bus`` is None
    """
    history = _counting(entries, saved=saved, size=size)
    fates: dict[int, list[str]] = {}
    for entry in history:
        for group_id in entry.groups:
            fates.setdefault(group_id, []).append(entry.kind)
    bound = (saved.next_group_id if saved else 0) + (bus.prompts + bus.last if bus else 0)  # ids are dense
    consumed = _consumed(saved, bus)
    every = bus.log if bus else ()
    log = [record for record in every if record.group_id < bound and not _is_foreign(record, saved, consumed)]
    logged = {record.group_id for record in log}
    unread = {record.group_id for record in log if record.sequence not in consumed}
    queued = frozenset(() if bus is None else bus.queued)
    found = _whereabouts(fates.keys(), saved=saved, queued=queued, logged=logged, unread=unread)
    doubled = {group_id for group_id, kinds in fates.items() if len(kinds) > 1}
    damaged = damage(history, until=None if saved is None else (saved.step, saved.position), size=size)
    if is_history_gone:
        damaged.append("history.jsonl is gone")
    due = due_checkpoint(history) if saved is None else 0
    no_checkpoint = [f"there is no checkpoint that can be read, and one was due at step {due}"] if due else []
    done = _against_checkpoint(history, saved=saved, is_damaged=bool(damaged))
    trimmed = [s for s in range(consumed.watermark, bus.first) if s not in consumed] if bus and saved else []
    ages = _ages(history, log, recorded_staleness or {})
    counts = {fate: sum(1 for kinds in fates.values() if fate in kinds) for fate in FATES}
    kept = {entry.position for entry in history}
    again = {i for entry in entries if entry.kind == "trained" and entry.position not in kept for i in entry.groups}
    begun = [entry for entry in history if entry.kind == BEGUN]
    return Account(
        prompts=found.prompts,
        published=len(fates.keys() | logged),
        **counts,
        pending=found.pending,
        lost=len(found.lost | done.lost) + len(trimmed),
        unrecorded=len(done.unrecorded),
        duplicated=len(doubled | done.unsaved),
        max_staleness=ages.largest,
        staleness_violations=len(ages.problems),
        incarnations=sum(entry.kind == BEGUN for entry in entries),
        retrained=sum("trained" in fates.get(group_id, ()) for group_id in again),
        foreign=len(every) - len(log),
        steps=sum(entry.kind == "trained" for entry in history),
        bound=max((entry.max_staleness for entry in begun), default=0),
        on_log=ages.on_log,
        with_metrics=ages.with_metrics,
        problems=(
            *found.problems,
            *(f"group {i}: {' and '.join(fates[i])}" for i in sorted(doubled)),
            *done.problems,
            *(f"log record {s}: trimmed, and not done by the checkpoint" for s in trimmed),
            *ages.problems,
        ),
        damage=(*damaged, *no_checkpoint, *damage_elsewhere),
        damaged_places=len(damaged) + len(no_checkpoint),
        bus_not_asked=bus_not_asked,
    )


def _counting(entries: Sequence[HistoryEntry], *, saved: SavedFacts | None, size: int | None) -> Sequence[HistoryEntry]:
    """Return the history that the newest weights have."""
    history = present(entries)
    if saved is None or size is None or size >= saved.position:
        return history
    # The file was cut before the checkpoint's position; the missing part may have recorded a fallback.
    return [entry for entry in history if all(group_id in saved.groups for group_id in entry.groups)]


@dataclass(slots=True)
class _Whereabouts:
    """Groups for which no line of the history gives a fate."""

    prompts: int
    pending: int
    lost: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _whereabouts(
    ended: Set[int],
    *,
    saved: SavedFacts | None,
    queued: Set[int],
    logged: Set[int],
    unread: Set[int],
) -> _Whereabouts:
    """Classify the groups without a fate.  ended: have a line;  queued, logged: on the bus;  unread: part of logged"""
    next_group_id = saved.next_group_id if saved else 0
    seen = ended | queued | logged | set(range(next_group_id))
    prompts = max(seen, default=-1) + 1
    found = _Whereabouts(prompts, prompts - len(seen))  # a resumed learner publishes the missing ids
    for group_id in sorted(seen):
        if group_id in ended or (saved is not None and group_id in saved.groups):
            continue
        if group_id in queued or group_id in unread:
            found.pending += 1
        elif group_id in logged:
            found.lost.add(group_id)
            found.problems.append(
                f"group {group_id}: its log record counts as read, but it was neither trained nor dropped"
            )
        elif saved is None or group_id >= next_group_id or group_id in saved.outstanding:
            found.pending += 1
        else:
            found.lost.add(group_id)
            found.problems.append(f"group {group_id}: neither done, nor on the bus, nor outstanding in the checkpoint")
    return found


@dataclass(slots=True)
class _Done:
    """Differences between the history and the checkpoint's ledger.

    lost, unrecorded  done by the ledger, but no line says how; unrecorded if the record is damaged
    unsaved           done by a line, but not by the ledger, so they may be done again
    """

    lost: set[int] = field(default_factory=set)
    unrecorded: set[int] = field(default_factory=set)
    unsaved: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _against_checkpoint(history: Sequence[HistoryEntry], *, saved: SavedFacts | None, is_damaged: bool) -> _Done:
    if saved is None:
        return _Done()
    done = {group_id for entry in history if entry.position < saved.position for group_id in entry.groups}
    unsaid = {i for i in (*range(saved.groups.watermark), *saved.groups.beyond) if i not in done}
    unsaved = {group_id for group_id in done if group_id not in saved.groups}
    problems = [f"group {i}: done, but not by the checkpoint's ledger" for i in sorted(unsaved)]
    if is_damaged:
        return _Done(unrecorded=unsaid, unsaved=unsaved, problems=problems)
    said = [f"group {i}: done by the checkpoint's ledger, but no line says how" for i in sorted(unsaid)]
    return _Done(lost=unsaid, unsaved=unsaved, problems=said + problems)


def _is_foreign(record: Logged, saved: SavedFacts | None, consumed: Ledger) -> bool:
    """Return whether the learner had read the record but never published its group, as of the checkpoint."""
    return saved is not None and record.group_id >= saved.next_group_id and record.sequence in consumed


def _consumed(saved: SavedFacts | None, bus: BusFacts | None) -> Ledger:
    """Return the log sequences that a resumed learner skips. A log shorter than the cursor is new and is read whole."""
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
    history: Sequence[HistoryEntry], log: Sequence[Logged], recorded_staleness: Mapping[tuple[int, int], int]
) -> _Ages:
    """Return the staleness of each trained group: from the log if it has the group, else as the step recorded it."""
    found = _Ages()
    records: dict[int, list[Logged]] = {}
    for record in log:
        records.setdefault(record.group_id, []).append(record)
    for entry, begun, resume_points in steps(history):
        bound, name = begun.max_staleness, f"step {entry.step} of incarnation {entry.incarnation}"
        facts = {
            i: one.trained(step=entry.step, resume_points=resume_points, discard=begun.discard, bound=bound)
            for i in entry.groups
            if (one := _record_of(entry, i, records.get(i, ()))) is not None
        }
        ages, left_out = {i: age for i, (age, _) in facts.items()}, sum(left for _, left in facts.values())
        found.on_log += len(ages)
        found.largest = max(found.largest, entry.max_staleness, *ages.values())
        of_tokens = begun.discard == "tokens"
        said, what = (entry.old_tokens, "tokens") if of_tokens else (entry.old_trajectories, "trajectories")
        if left_out != said and len(ages) == len(entry.groups):
            found.problems.append(f"{name}: {said} {what} were left out, by the log {left_out}")
        found.problems += [
            f"{name}: group {i} was {age} versions old, over {bound}" for i, age in ages.items() if age > bound
        ]
        if len(ages) == len(entry.groups):
            if (oldest := max(ages.values(), default=0)) != entry.max_staleness:
                found.problems.append(f"{name}: recorded staleness {entry.max_staleness}, by the log {oldest}")
        elif entry.max_staleness > bound:
            found.problems.append(f"{name}: trained a group {entry.max_staleness} versions old, over {bound}")
        measured = recorded_staleness.get((entry.incarnation, entry.step))
        found.with_metrics += measured is not None
        if measured is not None and measured != entry.max_staleness:
            found.problems.append(f"{name}: recorded staleness {entry.max_staleness}, by metrics.jsonl {measured}")
    return found


def _record_of(entry: HistoryEntry, group_id: int, records: Sequence[Logged]) -> Logged | None:
    """Return the record that this step trained; None if the log no longer has it."""
    return next((record for record in records if entry.is_record_of(group_id, record.sequence)), None)
