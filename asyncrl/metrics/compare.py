"""Compares two runs: settings, the groups of their batches, and the first step at which each metric differs. Pure.

Tests: tests/unit/metrics/test_compare.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CLOCKS: Final = (
    *("time", "*_seconds", "*seconds", "*_per_second", "*idle_ratio", "*_bytes", "learner/mfu"),
    *("rollout/*", "bus/*", "buffer/*", "weights/pause*", "weights/*lag*", "weights/*/*"),
    *("evaluation/time", "evaluation/engine_share"),
)
"""Metrics that depend on machines and timing, so they differ between any two runs."""
NAMES: Final = ("run.name", "run.directory")
"""Settings that differ between any two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A metric that differs. first: the first step where it differs; last: the last step that both runs have.

    at_first, at_last  its two values at these steps; None if a run has no value
    """

    name: str
    first: int
    at_first: tuple[Any, Any]
    last: int
    at_last: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """settings: key -> its two values, None if one run lacks the key.

    steps       (first, last) of each run; None without steps
    in_both     number of steps that both runs have
    batch       first step whose groups differ, ignoring their order; None if none does
    metrics     metrics that differ, ordered by the first step at which they do
    """

    settings: Mapping[str, tuple[Any, Any]]
    steps: tuple[tuple[int, int] | None, tuple[int, int] | None]
    in_both: int
    batch: int | None
    metrics: Sequence[Changed]

    @property
    def first(self) -> int | None:
        """The first step at which a metric differs."""
        return min((changed.first for changed in self.metrics), default=None)

    @property
    def is_none(self) -> bool:
        return not (self.settings or self.metrics or self.batch is not None or self.steps[0] != self.steps[1])


def difference(
    settings: tuple[Mapping[str, Any], Mapping[str, Any]],
    rows: tuple[Mapping[int, Mapping[str, Any]], Mapping[int, Mapping[str, Any]]],
    batches: tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]],
    *,
    tolerance: float = 0.0,
    with_clocks: bool = False,
) -> Difference:
    """Compare two runs.

    rows       step -> row of metrics
    batches    step -> trained groups
    tolerance  relative difference that counts as equal
    """
    a, b = rows
    shared = sorted(a.keys() & b.keys())
    names = {name for step in shared for name in a[step].keys() | b[step].keys()} - {"step"}
    if not with_clocks:
        names = {name for name in names if not any(fnmatch.fnmatchcase(name, clock) for clock in CLOCKS)}
    found = [changed for name in names if (changed := _changed(name, a, b, shared, tolerance)) is not None]
    trained = sorted(batches[0].keys() & batches[1].keys())
    return Difference(
        settings=dict(_settings(*settings)),
        steps=(_range(a), _range(b)),
        in_both=len(shared),
        batch=next((step for step in trained if sorted(batches[0][step]) != sorted(batches[1][step])), None),
        metrics=sorted(found, key=lambda changed: (changed.first, changed.name)),
    )


def flat(table: Mapping[str, Any], *, under: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for a table of tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, under=f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    here, there = dict(flat(a)), dict(flat(b))
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key) and key not in NAMES:
            yield key, (here.get(key), there.get(key))


def _changed(
    name: str,
    a: Mapping[int, Mapping[str, Any]],
    b: Mapping[int, Mapping[str, Any]],
    steps: Sequence[int],
    tolerance: float,
) -> Changed | None:
    for step in steps:
        pair = (a[step].get(name), b[step].get(name))
        if not _is_same(*pair, tolerance):
            last = steps[-1]
            at_last = (a[last].get(name), b[last].get(name))
            return Changed(name=name, first=step, at_first=pair, last=last, at_last=at_last)
    return None


def _is_same(a: Any, b: Any, tolerance: float) -> bool:
    if a == b:
        return True
    are_numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return bool(tolerance) and are_numbers and abs(a - b) <= tolerance * max(abs(a), abs(b))


def _range(rows: Mapping[int, Any]) -> tuple[int, int] | None:
    return (min(rows), max(rows)) if rows else None
