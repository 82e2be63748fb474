"""Events of a run on its timeline: faults, restarts, joined and quarantined workers. Pure, and bounded.

Tests: tests/unit/board/test_marks.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

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
