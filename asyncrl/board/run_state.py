"""The board's state of one run, and the changes that it sends to browsers. Pure, and bounded.

A change is a dict with its "kind". ``RunFeed`` sends it to every connected browser.

Tests: tests/unit/board/test_run_state.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from asyncrl.board.lanes import Doing, Lanes, change, head
from asyncrl.board.marks import Mark, Marks
from asyncrl.board.recorded_lanes import recorded_lanes
from asyncrl.board.series import Columns, Curve
from asyncrl.board.step_lanes import StepLanes, rank_name, rank_tokens

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
        self._step_lanes = StepLanes()
        self._last: dict[str, float] = {}
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
            self._step_lanes.add(row)
            self._ranks = len(rank_tokens(row))
            marks += self.marks.row(row)
            self._last = numbers | {"step": row["step"]}
            sent.append(numbers | {"step": row["step"], "histograms": {name: c for name, c in counts.items() if c}})
        if not rows:
            return []
        changes: list[Change] = [{"kind": "rows", "rows": sent}] if len(rows) <= MOST_ROWS else [{"kind": "reload"}]
        return [*changes, self.summary(), *_of_marks(marks)]

    def hear(
        self, actors: Mapping[str, tuple[Any, Doing]], *, findings: Iterable[Any], status: str, now: float
    ) -> list[Change]:
        """Record one look at a run that is up. actors: name -> (heartbeat, activity);  now: Unix seconds"""
        ranks = [rank_name(rank) for rank in range(1, self._ranks)] if LEARNER in actors else []
        # ranks share one heartbeat, because they wait and train together
        of_ranks = {name: actors[LEARNER] for name in ranks}
        lanes = {**actors, **of_ranks}
        self.beats = {name: beat for name, (beat, _) in lanes.items()}
        new, changed, restarted = self.lanes.hear(lanes, now=now)
        restarted = [name for name in restarted if name not in ranks]
        marks = [*self.marks.faults(findings, now=now), *self.marks.restarts(restarted, now=now)]
        is_other, self.status = status != self.status, status
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

    def is_away(self, why: str, *, now: float) -> list[Change]:
        """Record that the run is not up, or cannot be heard for the reason ``why``. All actors are removed."""
        is_done = 0 < self.steps <= self._last.get("step", 0)
        status = why or ("done" if is_done else "not up")
        if status == self.status:
            return []
        if self.beats:
            return self.hear({}, findings=(), status=status, now=now)
        self.status = status
        return [self.summary()]

    # -- what browsers get -------------------------------------------------------------------------------------------

    def summary(self) -> Change:
        """Return a summary of the run."""
        return {
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
        """Return lanes from the recorded ``timeline`` if given, else from heartbeats, else from metrics."""
        if timeline:
            return recorded_lanes(timeline)
        return self.lanes.as_json() if self.lanes.lanes else self._step_lanes.as_json()


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
