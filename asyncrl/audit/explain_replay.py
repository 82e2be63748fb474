"""Replays a run without some of its groups and measures a metric, for `asyncrl explain --replay`.

Each replay starts from the checkpoint before the change. Batches keep their steps: a batch is trained without the
groups that are left out, and a step that has none left is passed over. The change is *gone* if at most half of it is
left. The reference backend computes the same bits each time; another backend trains each replay three times, all three
must agree, and the interval that they span is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from asyncrl.audit.replay import Planned, plan_of, train_again
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import HistoryEntry

REPEATS = 3


class Replays:
    """since, step: first and last step of the change; normal: value of the metric before it. Raises ConfigError."""

    def __init__(
        self,
        recorded: RecordedRun,
        history: Sequence[HistoryEntry],
        bus: Bus,
        *,
        metric: str,
        since: int,
        step: int,
        normal: float,
    ) -> None:
        self._bus, self._metric, self._since, self._normal = bus, metric, since, normal
        plan, self._folder = plan_of(recorded, history, from_step=since, overrides=())
        self._plan = [planned for planned in plan if planned.step <= step]
        self._repeats = 1 if self._plan[-1].run.learner.backend == "reference" else REPEATS
        self._measured: dict[frozenset[int], list[float]] = {}

    async def is_gone_without(self, groups: Collection[int]) -> bool:
        """Return whether the change is gone in a replay without ``groups``."""
        change = statistics.fmean(await self._repeat(frozenset())) - self._normal
        found = await self._repeat(frozenset(groups))
        return all(math.isfinite(value) and abs(value - self._normal) <= abs(change) / 2 for value in found)

    def interval(self, without: Collection[int]) -> tuple[float, float] | None:
        """Return the least and the largest value of the metric in the replays without these groups, if there were any.

        ``without`` nothing: of the whole replays.
        """
        found = self._measured.get(frozenset(without))
        return None if found is None else (min(found), max(found))

    async def _repeat(self, left_out: frozenset[int]) -> list[float]:
        if left_out not in self._measured:
            self._measured[left_out] = [await self._measure(left_out) for _ in range(self._repeats)]
        return self._measured[left_out]

    async def _measure(self, left_out: Collection[int]) -> float:
        """Return the metric's mean over the steps of the change; NaN if no step of it is left."""
        plan = [kept for planned in self._plan if (kept := _without(planned, left_out, since=self._since)) is not None]
        values: list[float] = []
        with tempfile.TemporaryDirectory(prefix="asyncrl-explain-") as out:
            trained = train_again(plan, self._bus, folder=self._folder, out=Path(out))
            async with contextlib.aclosing(trained) as steps:
                async for step, metrics in steps:
                    if step >= self._since:
                        values.append(_number(metrics, self._metric))
        return statistics.fmean(values) if values else math.nan


def _without(planned: Planned, left_out: Collection[int], *, since: int) -> Planned | None:
    entry = planned.entry
    if planned.step < since or not left_out:
        return planned
    kept = [place for place, group_id in enumerate(entry.groups) if group_id not in left_out]
    if not kept:
        return None
    groups = tuple(entry.groups[place] for place in kept)
    sequences = tuple(entry.sequences[place] for place in kept) if entry.sequences else ()
    return planned._replace(entry=dataclasses.replace(entry, groups=groups, sequences=sequences))


def _number(metrics: Mapping[str, object], name: str) -> float:
    value = metrics.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"--metric {name}: a replay has no such number; it is of the engines, the bus, or the clock")
    return float(value)
