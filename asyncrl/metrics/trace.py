"""Converts a run's timeline to the trace format of Perfetto and Chrome. Pure.

Lanes: the learner (steps and its waits, copied and announced weights, checkpoints, published and arrived groups,
evaluations; the steps of each of its other ranks) and each worker (groups side by side with their reward calls; loads
and pauses of its engine; its waits). An arrow leads a group from its prompt through the worker to the step that trained
it.

Format: "Trace Event Format" (Google, 2016), events X, M, s, t and f; times in microseconds since the first event shown.

Tests: tests/unit/metrics/test_trace.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

LEARNER: Final = 1
_STEPS, _WEIGHTS, _CHECKPOINTS, _PROMPTS, _ARRIVALS, _EVALUATIONS, _RANKS = 1, 2, 3, 4, 5, 6, 10
_LEARNERS_LANES: Final = {
    _STEPS: "steps",
    _WEIGHTS: "weights",
    _CHECKPOINTS: "checkpoints",
    _PROMPTS: "prompts published",
    _ARRIVALS: "groups arrived",
    _EVALUATIONS: "evaluations",
}
_ENGINE, _WAITS, _GROUPS = 1, 2, 10
SAME_WAIT_SECONDS: Final = 3.0
"""Start times of one wait differ only by the age of the heartbeats that report it; within this limit they are the same
wait."""
_RANK: Final = re.compile(r"learner/rank(\d+)/tokens")
_POINT: Final = 1e-4
"""Seconds shown for events without a duration, so that they are visible."""

Event = dict[str, Any]


@dataclass(slots=True)
class _Process:
    """A worker. ends: end time of the last group in each of its lanes"""

    number: int
    lanes: dict[int, str] = field(default_factory=lambda: {_ENGINE: "engine", _WAITS: "waits"})
    ends: list[float] = field(default_factory=list)


def trace(rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the object that a trace viewer opens.

    rows         rows of timeline.jsonl, in order
    evaluations  metric rows of evaluated versions; evaluations that ended before the first step shown, and those of
                 versions after the last step shown, are left out
    """
    made = list(_Trace(rows, evaluations).events())
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": {"steps": len(rows)}}


def num_evaluations(made: Mapping[str, Any]) -> int:
    """Return the number of evaluations in a trace."""
    return sum(
        event["ph"] == "X" and event["tid"] == _EVALUATIONS and event["pid"] == LEARNER for event in made["traceEvents"]
    )


def rank_tokens(metrics: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each rank of the learner from a row of metrics; empty if the learner has one rank."""
    found = {int(name[1]): value for key, value in metrics.items() if (name := _RANK.fullmatch(key)) is not None}
    return [round(_number(found[rank])) for rank in sorted(found)]


class _Trace:
    def __init__(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        self._rows, self._evaluations = rows, evaluations
        self._workers: dict[str, _Process] = {}
        starts = [_number(row.get("time")) - _seconds_before(row) for row in rows]
        groups = [group for row in rows for group in row.get("groups", ())]
        starts += [time for group in groups for time in (_number(group[2]), _start_of(group)) if time]
        self._origin = min(starts, default=0.0)

    def events(self) -> Iterator[Event]:
        waits: dict[tuple[str, str], tuple[float, float]] = {}
        for row in self._rows:
            yield from self._step(row)
            for group in sorted(row.get("groups", ()), key=_start_of):
                yield from self._group(group, row)
            for load in row.get("loads", ()):
                yield from self._load(load)
            yield from self._waits(row, waits)
        for (name, what), (since, until) in waits.items():
            yield self._slice(self._worker(name).number, _WAITS, what, since, until)
        for evaluation in self._evaluations:
            yield from self._evaluation(evaluation, last_step=max((row["step"] for row in self._rows), default=0))
        count = max((len(row.get("ranks", ())) for row in self._rows), default=0)
        ranks = {_RANKS + rank: f"rank {rank}" for rank in range(1, count)}
        yield from _names(LEARNER, "learner", _LEARNERS_LANES | ranks)
        for name, process in self._workers.items():
            yield from _names(process.number, name, process.lanes)

    def _step(self, row: Mapping[str, Any]) -> Iterator[Event]:
        seconds, step, end = row.get("seconds", {}), row["step"], _number(row.get("time"))
        wait, train = _number(seconds.get("wait")), _number(seconds.get("train"))
        begun = end - train
        if wait > 0:
            yield self._slice(LEARNER, _STEPS, "wait for trajectories", begun - wait, begun)
        numbers = {"step": step, "incarnation": row.get("incarnation", 0), **seconds}
        for rank, tokens in enumerate(row.get("ranks", ())):
            if rank:
                yield self._slice(LEARNER, _RANKS + rank, f"step {step}", begun, end, tokens=tokens)
            else:
                numbers["tokens"] = tokens
        yield self._slice(LEARNER, _STEPS, f"step {step}", begun, end, **numbers)
        at = end
        for name in ("export", "publish"):
            if (length := _number(seconds.get(name))) > 0:
                yield self._slice(LEARNER, _WEIGHTS, f"{name} version {step}", at, at + length)
                at += length
        if (length := _number(seconds.get("checkpoint"))) > 0:  # written before the step
            before = begun - wait
            yield self._slice(LEARNER, _CHECKPOINTS, f"checkpoint of step {step - 1}", before - length, before)

    def _group(self, group: Sequence[Any], row: Mapping[str, Any]) -> Iterator[Event]:
        number, name, published, _, seconds, reward, arrived = group
        began = _start_of(group)
        worker = self._worker(str(name))
        lane = self._lane(worker, began, began + seconds)
        title, identity = f"group {number}", f"{row.get('incarnation', 0)}/{number}"
        flow = {"cat": "group", "name": "group", "id": identity}
        if published:
            yield self._slice(LEARNER, _PROMPTS, title, published, published + _POINT)
            yield flow | {"ph": "s", **self._place(LEARNER, _PROMPTS, published)}
        yield self._slice(worker.number, lane, title, began, began + seconds, trained_at_step=row["step"])
        yield flow | {"ph": "t" if published else "s", **self._place(worker.number, lane, began)}
        if reward > 0:
            end = began + seconds
            yield self._slice(worker.number, lane, "reward", max(began, end - reward), end)
        yield self._slice(LEARNER, _ARRIVALS, title, arrived, arrived + _POINT)
        yield flow | {"ph": "t", **self._place(LEARNER, _ARRIVALS, arrived)}
        begun = _number(row.get("time")) - _number(row.get("seconds", {}).get("train"))
        yield flow | {"ph": "f", "bp": "e", **self._place(LEARNER, _STEPS, begun)}

    def _load(self, load: Sequence[Any]) -> Iterator[Event]:
        name, version, ended, seconds, pause = load
        number = self._worker(str(name)).number
        yield self._slice(number, _ENGINE, f"load version {version}", ended - max(seconds, pause), ended)
        if pause > 0:
            yield self._slice(number, _ENGINE, "paused", ended - pause, ended)

    def _evaluation(self, row: Mapping[str, Any], *, last_step: int) -> Iterator[Event]:
        ended, seconds = _number(row.get("evaluation/time")), _number(row.get("evaluation/seconds"))
        if ended <= self._origin or row["step"] > last_step:
            return
        names = ("complete", "seconds", "lag_steps", "engine_share", "mixed")
        numbers = {name: row[f"evaluation/{name}"] for name in names if f"evaluation/{name}" in row}
        numbers |= {"version": row["step"], "incarnation": row.get("learner/incarnation", 0)}
        name = f"evaluation of version {row['step']}" + ("" if row.get("evaluation/complete") else ", incomplete")
        yield self._slice(LEARNER, _EVALUATIONS, name, ended - seconds, ended, **numbers)

    def _waits(self, row: Mapping[str, Any], open_: dict[tuple[str, str], tuple[float, float]]) -> Iterator[Event]:
        """Yield each wait that a later wait for the same follows. ``open_``: (worker, what) -> (since, last seen)."""
        seen = _number(row.get("time"))
        for name, what, _, since in row.get("waits", ()):
            key = (str(name), str(what))
            if key in open_ and abs(open_[key][0] - since) > SAME_WAIT_SECONDS:
                yield self._slice(self._worker(key[0]).number, _WAITS, key[1], *open_.pop(key))
            open_[key] = (open_[key][0] if key in open_ else since, max(seen, since))

    def _worker(self, name: str) -> _Process:
        return self._workers.setdefault(name or "?", _Process(LEARNER + 1 + len(self._workers)))

    def _lane(self, worker: _Process, began: float, ended: float) -> int:
        """Return the first lane in which the group overlaps no other."""
        for index, end in enumerate(worker.ends):
            if end <= began:
                worker.ends[index] = ended
                return _GROUPS + index
        worker.ends.append(ended)
        lane = _GROUPS + len(worker.ends) - 1
        worker.lanes[lane] = f"groups {len(worker.ends)}"
        return lane

    def _slice(self, process: int, lane: int, name: str, began: float, ended: float, **arguments: Any) -> Event:
        began = max(began, self._origin)  # a wait may have begun before the first step shown
        length = max(round((ended - began) * 1e6), 1)
        made = {"ph": "X", "name": name, "cat": "asyncrl", "dur": length, **self._place(process, lane, began)}
        return made | ({"args": arguments} if arguments else {})

    def _place(self, process: int, lane: int, time: float) -> Event:
        return {"pid": process, "tid": lane, "ts": max(round((time - self._origin) * 1e6), 0)}


def _names(process: int, name: str, lanes: Mapping[int, str]) -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for lane, title in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": lane, "args": {"sort_index": lane}}


def _start_of(group: Sequence[Any]) -> float:
    """Start of a group on the worker's clock; derived from its arrival if that time is implausible."""
    _, _, _, began, seconds, _, arrived = group
    return float(began) if began > 0 and arrived - 86_400 < began <= arrived + 1 else float(arrived - seconds)


def _seconds_before(row: Mapping[str, Any]) -> float:
    return sum(_number(row.get("seconds", {}).get(name)) for name in ("wait", "train", "checkpoint"))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else 0.0
