"""Where two runs differ: settings, the groups of their batches, and from which step on each number. Pure.

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
"""Metrics that differ between any two runs: they tell of the machines."""
NAMES: Final = ("run.name", "run.directory")
"""Settings that any two runs have of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A metric that is not the same in both. first: the first step where it differs; last: the last that both have.

    at_first, at_last  its two values there; None where a run has none
    """

    name: str
    first: int
    at_first: tuple[Any, Any]
    last: int
    at_last: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """settings: key -> its two values, None where one lacks it.

    steps       (first, last) of each run; None without any
    in_both     how many steps both have
    batch       first step whose groups differ, in whatever order; None: of no step
    metrics     those that differ, the first to do so first
    """

    settings: Mapping[str, tuple[Any, Any]]
    steps: tuple[tuple[int, int] | None, tuple[int, int] | None]
    in_both: int
    batch: int | None
    metrics: Sequence[Changed]

    @property
    def first(self) -> int | None:
        """The first step whose numbers differ."""
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
    """rows: step -> row of metrics;  batches: step -> groups trained;  tolerance: relative difference that is none"""
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
    """("section.key", value) of a table of tables."""
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
