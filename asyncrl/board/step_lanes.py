"""Lanes of a run that was not watched while it was up: the parts of each step, from its rows of metrics. Pure.

The learner's seconds are exact. For a worker, a row has only the share of time in which its engine had nothing to
decode. A step is therefore shown as either generating or waiting, whichever was longer.

Tests: tests/unit/board/test_lanes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.board.lanes import number_of

MOST_STEPS: Final = 400
MOST_WORKERS: Final = 64
"""Maximum number of workers in a row of metrics (actors/learner/metrics_reporter.py)."""

_WORKER: Final = re.compile(r"rollout/(?P<name>.+)/idle_ratio")
_RANK: Final = re.compile(r"learner/rank(?P<rank>\d+)/tokens")


@dataclass(frozen=True, slots=True)
class Step:
    """end: Unix seconds;  wait, train, write: seconds (write: of a checkpoint);  ranks: tokens of each rank"""

    step: int
    end: float
    wait: float
    train: float
    write: float
    idle: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[int] = ()


class StepLanes:
    """The last steps of one run. If there are too many, every second one is kept."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._stride = 1
        self._skipped = 0

    def add(self, row: Mapping[str, Any]) -> None:
        end = row.get("time")
        if not isinstance(end, float | int):
            return
        while self._steps and self._steps[-1].step >= row["step"]:
            self._steps.pop()
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        idle = {found["name"]: value for name, value in row.items() if (found := _WORKER.fullmatch(name)) is not None}
        names = [name for name in list(idle)[:MOST_WORKERS] if isinstance(idle[name], float | int)]
        self._steps.append(
            Step(
                step=row["step"],
                end=float(end),
                wait=_number(row, "learner/wait_seconds"),
                train=_number(row, "learner/step_seconds"),
                write=_number(row, "learner/checkpoint_seconds"),
                idle={name: float(idle[name]) for name in names},
                versions={name: int(_number(row, f"weights/{name}/version")) for name in names},
                ranks=rank_tokens(row),
            )
        )
        if len(self._steps) > MOST_STEPS:
            self._steps = self._steps[1::2]
            self._stride *= 2

    def as_json(self) -> dict[str, Any]:
        """Return the lanes in the format of Lanes.as_json."""
        if not self._steps:
            return {"begin": 0.0, "end": 0.0, "left_out": 0, "source": "metrics", "lanes": []}
        first = self._steps[0]
        begin, end = first.end - first.wait - first.train - first.write, self._steps[-1].end
        names = list(dict.fromkeys(name for step in self._steps for name in step.idle))[: 4 * MOST_WORKERS]
        lanes = [{"id": 0, "name": "learner", "role": "learner", "version": self._steps[-1].step}]
        lanes[0]["segments"] = list(learner_segments(self._steps, begin, has_gaps=self._stride > 1))
        lanes += rank_lanes(self._steps, begin, has_gaps=self._stride > 1)
        for number, name in enumerate(names, len(lanes)):
            version = next(step.versions[name] for step in reversed(self._steps) if name in step.versions)
            head = {"id": number, "name": name, "role": "rollout-worker", "version": version}
            lanes.append(head | {"segments": list(self._worker(name, begin))})
        return {"begin": begin, "end": end, "left_out": 0, "source": "metrics", "lanes": lanes}

    def _worker(self, name: str, begin: float) -> Iterator[list[Any]]:
        before, last = begin, ""
        for step in self._steps:
            idle = step.idle.get(name)
            state = "" if idle is None else "waiting" if idle > 0.5 else "generating"
            if state != last:
                yield [round(before - begin, 2), number_of(state)]
            before, last = step.end, state
        yield [round(before - begin, 2), -1]


def rank_lanes(steps: Sequence[Step], begin: float, *, has_gaps: bool = False) -> list[dict[str, Any]]:
    """Return lanes of all ranks except the first, which has the learner's lane. They wait and train with it."""
    count = max((len(step.ranks) for step in steps), default=0)
    return [
        {
            "id": rank,
            "name": rank_name(rank),
            "role": "learner",
            "version": steps[-1].step,
            "segments": list(learner_segments(steps, begin, rank=rank, has_gaps=has_gaps)),
        }
        for rank in range(1, count)
    ]


def rank_tokens(row: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each rank of the learner from a row of metrics; empty if the learner has one rank."""
    found = {int(name["rank"]): row[key] for key in row if (name := _RANK.fullmatch(key)) is not None}
    return [int(found[rank]) if isinstance(found[rank], float | int) else 0 for rank in sorted(found)]


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


def learner_segments(
    steps: Sequence[Step], begin: float, *, rank: int = 0, has_gaps: bool = False
) -> Iterator[list[Any]]:
    """Yield segments of a rank's lane, in seconds since ``begin``.

    has_gaps: some steps between the given ones are left out
    """
    before = begin
    for step in steps:
        parts = (("writing", step.write, "a checkpoint"), ("waiting", step.wait, "trajectories"))
        tokens = f": {step.ranks[rank]:,} tokens" if rank < len(step.ranks) else ""
        tokens += ", in rank 0's time" if rank else ""  # times of other ranks are not recorded
        at = max(before, step.end - step.wait - step.write - step.train)
        for state, seconds, text in (*parts, ("training", step.train, f"step {step.step}{tokens}")):
            if seconds > 0:
                yield [round(at - begin, 2), number_of(state), text]
                at += seconds
        if has_gaps:
            yield [round(step.end - begin, 2), -1]
        before = step.end
    yield [round(before - begin, 2), -1]


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, float | int) and value > 0 else 0.0
