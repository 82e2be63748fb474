"""Lines of a run's history, and the selection of those that belong to the newest weights.

**Only the history of the newest weights counts.** A learner that is killed after step n and resumes from the checkpoint
of step k < n has weights that never saw steps k + 1 to n. The groups of these steps are trained again, and they are not
duplicates. Each incarnation of the learner begins with a line that says how long the file was when its checkpoint was
made. The lines between that length and this line are rolled back (``present``). Its number is higher than all before.

**A damaged record is not a lost group.** An unreadable line becomes an entry of kind "damaged". Missing lines are
detected too: an incarnation begins on a checkpoint that had seen more of the file than exists, or has no first line.

Tests: tests/unit/policies/audit/test_accounting.py, test_damaged_record.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.config.staleness import Discard
from asyncrl.policies.groups.states import FATES as FATES
from asyncrl.policies.staleness.staleness import ResumePoints

BEGUN: Final = "begun"
DAMAGED: Final = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One line of the history, in the order of writing.

    kind           "begun": an incarnation of the learner begins; "damaged": an unreadable line, or missing lines;
                   otherwise one of FATES
    step           "trained": number of the step; other kinds: steps done so far
    position       bytes of the file before this line
    groups         ids that met this fate, in the order of the batch
    sequences      "trained": log record of each group
    max_staleness  "trained": staleness of the batch's oldest sampled token; "begun": bound of this incarnation
    old_trajectories  "trained": trajectories that trained nothing because they were too old
    old_tokens     "trained": tokens that trained nothing because they were too old
    kept           "begun": earlier lines from this position on are not in the history of the weights
    settings       "begun": the run file (config/record.py); empty if that line is damaged
    data           "begun": SHA-256 of each data file, by its path
    host           "begun": the machine that the learner ran on (os_process.py: process_space)
    problem        "damaged": the line and what is wrong with it
    """

    kind: str
    incarnation: int
    step: int
    position: int
    groups: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    max_staleness: int = 0
    old_trajectories: int = 0
    old_tokens: int = 0
    kept: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    problem: str = ""

    @property
    def discard(self) -> Discard:
        """Of "begun": the unit that trains nothing once its oldest token is too old (staleness.discard)."""
        staleness = self.settings.get("staleness", {})
        named = staleness.get("discard") if isinstance(staleness, Mapping) else None
        return named if named in ("trajectories", "tokens") else "groups"

    def is_record_of(self, group_id: int, sequence: int) -> bool:
        """Return whether this step trained the group from that log record; a late worker may add a second record."""
        return not self.sequences or (group_id, sequence) in zip(self.groups, self.sequences, strict=False)


def present(entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Return the history of the newest weights, without the lines that were rolled back."""
    history: list[HistoryEntry] = []
    incarnation, is_repeated = -1, False
    for entry in entries:
        if entry.kind == BEGUN:
            is_repeated = entry.incarnation <= incarnation
            if is_repeated:
                problem = f"incarnation {entry.incarnation} begins a second time, as if lines were copied"
                history.append(_damaged(entry, problem=problem, position=entry.position))
        if is_repeated:
            continue
        if entry.kind == BEGUN:
            _fall_back(history, kept=entry.kept)
            if entry.kept > entry.position:
                _forget_steps_behind(history, entry.step)
                problem = f"incarnation {entry.incarnation} began with more than there is of the file"
                history.append(_damaged(entry, problem=problem, position=min(entry.position, _end(history))))
            incarnation = entry.incarnation
        elif entry.kind != DAMAGED and entry.incarnation != incarnation:
            begun = _supposed(entry, history, entries)
            _fall_back(history, kept=begun.kept)
            problem = f"the line that began incarnation {entry.incarnation} is gone"
            history += [_damaged(begun, problem=problem, position=begun.position), begun]
            incarnation = entry.incarnation
        history.append(entry)
    return history


def steps(history: Sequence[HistoryEntry]) -> Iterator[tuple[HistoryEntry, HistoryEntry, ResumePoints]]:
    """Yield each trained step of a present history, the line that began its incarnation, and the resume_points at that
    time."""
    resume_points: dict[int, int] = {}
    for entry in history:
        if entry.kind == BEGUN:
            begun = entry
            if entry.incarnation > 0:
                resume_points = resume_points | {entry.incarnation: entry.step}
        elif entry.kind == "trained":
            yield entry, begun, resume_points


def promotions(history: Sequence[HistoryEntry]) -> list[int]:
    """Return the steps after which a shadow's state took the place of the run's (audit/shadow.py: promote).

    Its incarnation begins one version before the newest step: any other begins at that step.
    """
    found, newest = [], 0
    for entry in history:
        if entry.kind == "trained":
            newest = entry.step
        elif entry.kind == BEGUN and entry.step == newest - 1:
            found.append(newest)
    return found


def damage(
    history: Sequence[HistoryEntry], *, until: tuple[int, int] | None = None, size: int | None = None
) -> list[str]:
    """Return a sentence for each damaged place of a present history, with the steps that may be missing there.

    until  (step, position) of the newest checkpoint; position is the length of the file at that time, in bytes
    size   length of the file now, in bytes
    """
    found: list[str] = []
    before, problems = 0, list[str]()
    for entry in history:
        if entry.kind == DAMAGED:
            problems.append(entry.problem)
        elif problems and entry.kind == "trained":
            found.append(_in_words(problems, first=before + 1, last=entry.step - 1))
            problems = []
        before = entry.step if entry.kind == "trained" else before
    if until is not None and size is not None and size < until[1]:
        problems.append(f"it has {size:,} bytes, and the checkpoint of step {until[0]} was made with {until[1]:,}")
    if problems:
        found.append(_in_words(problems, first=before + 1, last=None if until is None else until[0]))
    return found


def due_checkpoint(history: Sequence[HistoryEntry]) -> int:
    """Return the last step after which a checkpoint must have been written, given the later steps; 0 if none."""
    due = 0
    for entry, begun, _ in steps(history):
        section = begun.settings.get("checkpoint") if isinstance(begun.settings, Mapping) else None
        every = section.get("every_steps") if isinstance(section, Mapping) else None
        if type(every) is int and every > 0:
            before = (entry.step - 1) // every * every  # it is written before the next step is trained
            due = max(due, before if before > begun.step else 0)
        due = max(due, begun.step)  # this incarnation began from a checkpoint of that step
    return due


def _in_words(problems: Sequence[str], *, first: int, last: int | None) -> str:
    what = problems[0] if len(problems) == 1 else f"{problems[0]}; to {problems[-1]}"
    if last is None:
        steps = f"from step {first} on"
    else:
        steps = f"steps {first} to {last}" if last > first else f"step {first}" if last == first else f"at step {last}"
    return f"history.jsonl is damaged ({steps}): {what}"


def _fall_back(history: list[HistoryEntry], *, kept: int) -> None:
    while history and history[-1].position >= kept:
        history.pop()


def _forget_steps_behind(history: list[HistoryEntry], step: int) -> None:
    """Remove the steps after ``step`` when missing lines make positions meaningless."""
    lost = (index for index, entry in enumerate(history) if entry.kind == "trained" and entry.step > step)
    del history[next(lost, len(history)) :]


def _supposed(first: HistoryEntry, history: Sequence[HistoryEntry], entries: Sequence[HistoryEntry]) -> HistoryEntry:
    """Reconstruct, as far as possible, the line that began the incarnation whose first known entry is ``first``."""
    step = first.step - 1 if first.kind == "trained" else first.step
    later = (entry.position for entry in history if entry.kind in FATES and _ended_behind(entry, step))
    bounds = [entry.max_staleness for entry in entries if entry.kind == BEGUN]
    return HistoryEntry(
        kind=BEGUN,
        incarnation=first.incarnation,
        step=step,
        position=first.position,
        kept=next(later, first.position),
        max_staleness=max(bounds or [entry.max_staleness for entry in entries]),
    )


def _ended_behind(entry: HistoryEntry, step: int) -> bool:
    """Return whether a checkpoint of ``step`` may have been made before this line."""
    return entry.step > step if entry.kind == "trained" else entry.step >= step


def _damaged(entry: HistoryEntry, *, problem: str, position: int) -> HistoryEntry:
    return HistoryEntry(
        kind=DAMAGED, incarnation=entry.incarnation, step=entry.step, position=position, problem=problem
    )


def _end(history: Sequence[HistoryEntry]) -> int:
    return history[-1].position + 1 if history else 0
