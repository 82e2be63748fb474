"""The board's state of one run, and the changes that it sends to browsers. Pure, and bounded.

A change is a dict with its "kind". ``RunFeed`` sends it to every connected browser. Curves and histograms merge
neighbours if there are too many points: a long run is shown at a lower resolution, but completely.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from asyncrl.board.lanes import Activity, Lanes, change, head
from asyncrl.board.recorded_lanes import rank_name, recorded_lanes
from asyncrl.metrics.trace import rank_tokens
from asyncrl.policies.health.conditions import ALARMS
from asyncrl.policies.health.vital_signs import WATCHED, verdict, vital_signs

# -- curves and histograms ---------------------------------------------------------------------------------------------

MOST_POINTS: Final = 2000
MOST_COLUMNS: Final = 400
MOST_BINS: Final = 64
"""Maximum number of bins of a histogram; the last bin also counts everything beyond."""


class Curve:
    """One metric over steps. A point is the mean over ``stride`` steps, at the last of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.stride = 1
        self._pending: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Add a value. If the step is not new, a resumed learner trained it again, and later points are dropped."""
        self.rewind(step)
        self._pending.append(value)
        if len(self._pending) < self.stride:
            return
        self.steps.append(step)
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.steps) > MOST_POINTS:
            self._halve()

    def rewind(self, step: int) -> None:
        if self.steps and self.steps[-1] >= step:
            self._pending = []
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def _halve(self) -> None:
        if len(self.steps) % 2:  # the last point has no neighbour yet
            self._pending = [self.values.pop()] * self.stride
            self.steps.pop()
        self.steps = self.steps[1::2]
        self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
        self.stride *= 2


class Columns:
    """A histogram per step. A column is the sum over ``stride`` steps, and starts at the first of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.counts: list[list[int]] = []
        self.stride = 1
        self._in_last = 0

    def add(self, step: int, counts: Sequence[int]) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.counts.pop()
            self._in_last = self.stride
        if self.steps and self._in_last < self.stride:
            self.counts[-1] = _summed(self.counts[-1], folded(counts))
            self._in_last += 1
            return
        self.steps.append(step)
        self.counts.append(folded(counts))
        self._in_last = 1
        if len(self.steps) > MOST_COLUMNS:
            self._halve()

    def _halve(self) -> None:
        pairs = zip_longest(self.counts[::2], self.counts[1::2], fillvalue=list[int]())
        self._in_last += self.stride if len(self.steps) % 2 == 0 else 0
        self.steps, self.counts = self.steps[::2], [_summed(list(a), list(b)) for a, b in pairs]
        self.stride *= 2


def folded(counts: Sequence[int]) -> list[int]:
    """Limit a histogram to MOST_BINS bins; the last one also counts everything beyond."""
    if len(counts) <= MOST_BINS:
        return list(counts)
    return [*counts[: MOST_BINS - 1], sum(counts[MOST_BINS - 1 :])]


def _summed(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


# -- events on the timeline --------------------------------------------------------------------------------------------

MOST_MARKS: Final = 500
LONGEST_TEXT: Final = 500

SHOWN: Final = frozenset({"joined", "quarantined", "released", "rejected", "resumed", "first_trained", "failed"})
"""Kinds of events that become marks. Events of single groups are counted in the curves instead."""

Mark = dict[str, Any]
"""{"time": Unix seconds, "kind", "actor", "text"}; a fault also has "remedy", and "until" once it is over."""


class Marks:
    """The marks of one run, in the order in which they became known."""

    def __init__(self) -> None:
        self.all: deque[Mark] = deque(maxlen=MOST_MARKS)
        self._open: dict[tuple[str, str], Mark] = {}
        self._incarnation = 0

    def faults(self, findings: Iterable[Any], *, now: float) -> list[Mark]:
        """Update faults with the findings of a look. Returns new faults and faults that ended."""
        found = {finding.key: finding for finding in findings}
        changed = []
        for key, finding in found.items():
            if key not in self._open:
                mark = _mark(
                    now - max(0.0, finding.seconds), "fault", finding.actor, f"{finding.fault}: {finding.text}"
                )
                self._open[key] = mark | {"remedy": finding.remedy[:LONGEST_TEXT], "until": None}
                self.all.append(self._open[key])
                changed.append(self._open[key])
        for key in self._open.keys() - found.keys():
            mark = self._open.pop(key)
            mark["until"] = now
            changed.append(mark)
        return changed

    def event(self, event: Any) -> list[Mark]:
        """Add an event of the bus. Returns the new marks."""
        if event.kind not in SHOWN:
            return []
        text = ", ".join(
            f"{name} {value}" for name, value in event.data.items() if isinstance(value, str | int | float)
        )
        mark = _mark(event.time, event.kind, event.actor, text)
        # known already if events are read again after the bus was away
        return [] if mark in self.all else self._added(mark)

    def restarts(self, names: Iterable[str], *, now: float) -> list[Mark]:
        """Add marks for actors whose process changed since the previous look."""
        return [mark for name in names for mark in self._added(_mark(now, "restart", name, "another process"))]

    def row(self, row: Mapping[str, Any]) -> list[Mark]:
        """Check a row of metrics: the first row of a new incarnation means that the learner was restarted."""
        incarnation = row.get("learner/incarnation")
        if not isinstance(incarnation, float | int) or incarnation == self._incarnation:
            return []
        is_first = not self._incarnation and row["step"] == 1
        self._incarnation = int(incarnation)
        time = row.get("time")
        if is_first or not isinstance(time, float | int):
            return []
        load = row.get("learner/load_seconds")
        began = f", ready after {load:.0f} s" if isinstance(load, float | int) else ""
        text = f"incarnation {self._incarnation} goes on with step {row['step']}{began}"
        return self._added(_mark(time, "restart", "learner", text))

    def _added(self, mark: Mark) -> list[Mark]:
        self.all.append(mark)
        return [mark]


def _mark(time: float, kind: str, actor: str, text: str) -> Mark:
    return {"time": time, "kind": kind, "actor": actor[:LONGEST_TEXT], "text": text[:LONGEST_TEXT]}


# -- the state of a run ------------------------------------------------------------------------------------------------

MOST_CURVES: Final = 500
MOST_ROWS: Final = 50
"""Maximum number of rows in one change; for more rows, browsers reload the curves."""
HISTOGRAMS: Final = ("staleness/histogram", "length/trained", "length/dropped")
LEARNER: Final = "learner"
EVALUATION: Final = "evaluation/complete"
"""Key that identifies the row of an evaluation."""

_OF_ONE: Final = re.compile(r"(rollout|weights)/.+/.+|learner/rank\d+/tokens")

Change = dict[str, Any]


class RunState:
    """name: of the run"""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        """Total number of steps of the run; 0: unknown."""
        self.curves: dict[str, Curve] = {}
        self.columns = {name: Columns() for name in HISTOGRAMS}
        self.lanes = Lanes()
        self.marks = Marks()
        self.beats: Mapping[str, Any] = {}
        """The last heartbeat of each present actor."""
        self.status = "not up"
        self._last: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._findings: list[Any] = []
        self._rang: dict[str, int] = {}  # alarm -> the last step at which it was on
        self._ranks = 0  # number of the learner's ranks, if there are several

    # -- what is heard -----------------------------------------------------------------------------------------------

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Change]:
        """Add rows of metrics.jsonl, in the order of the file."""
        marks: list[Mark] = []
        sent = []
        for row in rows:
            numbers = {name: value for name, value in row.items() if is_curve(name, value)}
            if EVALUATION in row:  # metrics that steps also have would rewind the curves to this row's step
                numbers = {name: value for name, value in numbers.items() if name.startswith("evaluation/")}
            for name, value in numbers.items():
                if name in self.curves or len(self.curves) < MOST_CURVES:
                    self.curves.setdefault(name, Curve()).add(row["step"], float(value))
            # the row belongs to an earlier step than its neighbours and has only evaluation metrics
            if EVALUATION in row:
                sent.append(numbers | {"step": row["step"], "histograms": {}})
                continue
            counts = {name: _counts(row.get(name)) for name in HISTOGRAMS}
            for name, found in counts.items():
                if found:
                    self.columns[name].add(row["step"], found)
            self._ranks = len(rank_tokens(row))
            marks += self.marks.row(row)
            self._last = numbers | {"step": row["step"]}
            self._first = self._first or numbers
            self._rang |= {name: row["step"] for name in ALARMS if numbers.get(name)}
            sent.append(numbers | {"step": row["step"], "histograms": {name: c for name, c in counts.items() if c}})
        if not rows:
            return []
        changes: list[Change] = [{"kind": "rows", "rows": sent}] if len(rows) <= MOST_ROWS else [{"kind": "reload"}]
        return [*changes, self.summary(), *_of_marks(marks)]

    def update(
        self, actors: Mapping[str, tuple[Any, Activity]], *, findings: Iterable[Any], status: str, now: float
    ) -> list[Change]:
        """Record one look at a run that is up. actors: name -> (heartbeat, activity);  now: Unix seconds"""
        findings = list(findings)
        ranks = [rank_name(rank) for rank in range(1, self._ranks)] if LEARNER in actors else []
        # ranks share one heartbeat, because they wait and train together
        of_ranks = {name: actors[LEARNER] for name in ranks}
        lanes = {**actors, **of_ranks}
        self.beats = {name: beat for name, (beat, _) in lanes.items()}
        new, changed, restarted = self.lanes.update(lanes, now=now)
        restarted = [name for name in restarted if name not in ranks]
        marks = [*self.marks.faults(findings, now=now), *self.marks.restarts(restarted, now=now)]
        is_other = status != self.status or {one.key for one in findings} != {one.key for one in self._findings}
        self.status, self._findings = status, findings
        changes: list[Change] = [
            {
                "kind": "lanes",
                "end": now,
                "new": [head(lane) for lane in new],
                "changed": [change(lane) for lane in changed],
                "totals": self.lanes.totals(),
            }
        ]
        return [*changes, *([self.summary()] if is_other else []), *_of_marks(marks)]

    def add_event(self, event: Any) -> list[Change]:
        return _of_marks(self.marks.event(event))

    def set_away(self, why: str, *, now: float) -> list[Change]:
        """Record that the run is not up, or cannot be heard for the reason ``why``. All actors are removed."""
        is_done = 0 < self.steps <= self._last.get("step", 0)
        status = why or ("done" if is_done else "not up")
        if status == self.status:
            return []
        if self.beats:
            return self.update({}, findings=(), status=status, now=now)
        self.status = status
        return [self.summary()]

    # -- what browsers get -------------------------------------------------------------------------------------------

    def summary(self) -> Change:
        """Return a summary of the run."""
        now = {name: self._last[name] for name in WATCHED if name in self._last}
        is_healthy, why = verdict(now, self._findings, self._rang)
        return {
            "health": {
                "is_good": is_healthy,
                "why": why[:LONGEST_TEXT],
                "numbers": [dataclasses.asdict(sign) for sign in vital_signs(now, self._first)],
            },
            "kind": "summary",
            "name": self.name,
            "steps": self.steps,
            "status": self.status,
            "last": {name: self._last[name] for name in _SUMMARY if name in self._last},
        }

    def overview(self) -> Change:
        """Return the initial state for a browser."""
        return self.summary() | {
            "curves": sorted(self.curves),
            "marks": list(self.marks.all),
            "histograms": {
                name: {"steps": columns.steps, "counts": columns.counts} for name, columns in self.columns.items()
            },
        }

    def curves_named(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return name -> [steps, values] for the curves that exist."""
        return {name: [self.curves[name].steps, self.curves[name].values] for name in names if name in self.curves}

    def lanes_as_json(self, timeline: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return lanes from heartbeats; if there are none, from the recorded ``timeline``."""
        return self.lanes.as_json() if self.lanes.lanes and not timeline else recorded_lanes(timeline)


_SUMMARY: Final = ("step", "weights/version", "reward/mean", "learner/tokens_per_second", "rollout/workers", "time")


def is_curve(name: str, value: object) -> bool:
    """Whether a metric is a finite number of the whole run, not of one worker or rank."""
    is_number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and name != "step" and _OF_ONE.fullmatch(name) is None


def _counts(value: object) -> list[int]:
    counts = value.get("counts") if isinstance(value, dict) else None
    return counts if isinstance(counts, list) and all(type(count) is int for count in counts) else []


def _of_marks(marks: Sequence[Mark]) -> list[Change]:
    return [{"kind": "marks", "marks": list(marks)}] if marks else []
