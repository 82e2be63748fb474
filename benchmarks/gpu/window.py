"""Calculate an arm's numbers from its rows and samples, between the ends of two steps. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The measured part of an arm: steps after the first ``warmup`` ones, until they fill ``seconds``.

    warmup     at least 1, because the window begins at the end of a step
    min_steps  minimum number of steps, however long they take
    """

    warmup: int
    seconds: float
    min_steps: int = 2

    def is_enough(self, rows: Sequence[Row]) -> bool:
        steps = len(rows) - self.warmup
        return steps >= self.min_steps and float(rows[-1]["time"] - rows[self.warmup - 1]["time"]) >= self.seconds


def measure(rows: Sequence[Row], samples: Sequence[Sample], *, warmup: int) -> Row:
    """Return the arm's numbers. Raises ValueError if nothing is left after the warm-up."""
    if len(rows) <= warmup:
        raise ValueError(f"only {len(rows)} steps, of which {warmup} are warm-up")
    first, steps = rows[warmup - 1], rows[warmup:]
    begin, end = float(first["time"]), float(steps[-1]["time"])
    seconds = end - begin
    tokens = sum(map(trained_tokens, steps))
    waited, trained = _sum(steps, "learner/wait_seconds"), _sum(steps, "learner/step_seconds")
    within = [sample for sample in samples if begin <= sample["time"] <= end]
    fresh = [step for step in steps if "mismatch/fresh_mean" in step]
    return {
        "tokens_per_second": tokens / seconds,
        "learner_idle": waited / seconds,
        "learner_overhead": 1 - (waited + trained) / seconds,
        "export_seconds": _mean(steps, "learner/export_seconds"),
        "publish_seconds": _mean(steps, "weights/publish_seconds"),
        "mfu": _mean(steps, "learner/mfu"),
        "staleness_mean": sum(trained_tokens(step) * step["staleness/mean"] for step in steps) / max(tokens, 1),
        "staleness_max": int(max(step["staleness/max"] for step in steps)),
        "dropped_groups": int(steps[-1]["staleness/dropped_groups"] - first["staleness/dropped_groups"]),
        "failed_groups": int(steps[-1]["staleness/failed_groups"]),
        "fresh_mismatch": _mean(fresh, "mismatch/fresh_mean") if fresh else None,
        "steps": len(steps),
        "step_seconds": seconds / len(steps),
        "train_seconds": trained / len(steps),
        "window_seconds": seconds,
        **engines(within),
        **pauses(within),
    }


def trained_tokens(row: Row) -> int:
    """Return the response tokens of the step's batch; each is in one bin of the staleness histogram."""
    return int(sum(row["staleness/histogram"]["counts"]))


def engines(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the engines' numbers.

    engine_idle                     share of a server's samples with nothing running
    rollout_idle                    the same as reported by workers
    engine_running, engine_waiting  sequences of one server
    generated_tokens_per_second     total, as reported by workers
    """
    looks = [engine for sample in samples for engine in sample["engines"] if engine is not None]
    beats = [list(workers(sample)) for sample in samples]
    said = [numbers for numbers_of_all in beats for numbers in numbers_of_all]
    return {
        "engine_idle": _average([float(look["running"] == 0) for look in looks]),
        "engine_running": _average([look["running"] for look in looks]),
        "engine_waiting": _average([look["waiting"] for look in looks]),
        "rollout_idle": _average([numbers.get("rollout/idle_ratio", 0.0) for numbers in said]),
        "generated_tokens_per_second": _average(
            [sum(numbers.get("rollout/tokens_per_second", 0.0) for numbers in of_all) for of_all in beats]
        ),
    }


def pauses(samples: Sequence[Sample]) -> dict[str, float]:
    """Return for the loads seen: how long the engine decoded nothing, and how long the load took.

    A heartbeat reports only the last load, so of two loads within 2 s one is missed.
    """
    seen: dict[str, float] = {}
    pause, load = [], []
    for sample in samples:
        for name, actor in sample["actors"].items():
            numbers = actor["numbers"]
            loads = numbers.get("weights/loads")
            if loads is None:
                continue
            if name in seen and loads > seen[name]:
                pause.append(numbers["weights/pause_seconds"])
                load.append(numbers.get("weights/load_seconds", 0.0))
            seen[name] = loads
    return {
        "loads": len(pause),
        "pause_p50": float(np.quantile(pause, 0.5)) if pause else 0.0,
        "pause_p99": float(np.quantile(pause, 0.99)) if pause else 0.0,
        "load_seconds": _average(load),
    }


def workers(sample: Sample) -> Iterator[Mapping[str, float]]:
    """Yield the numbers of each rollout worker's last heartbeat."""
    return (actor["numbers"] for actor in sample["actors"].values() if actor["role"] == "rollout-worker")


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def _mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean over the rows that have the number; 0 if none has."""
    return _average([row[name] for row in rows if row.get(name) is not None])


def _average(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


# -- arms against each other -------------------------------------------------------------------------------------------


def best(rows: Sequence[Row]) -> dict[str, Row]:
    """Return for each kind of arm the split that trained most tokens per second. Failed arms are left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if "error" not in row and (
            row["arm"] not in found or row["tokens_per_second"] > found[row["arm"]]["tokens_per_second"]
        ):
            found[row["arm"]] = row
    return found


def ratios(rows: Sequence[Row], *, ours: str = "async") -> Iterator[str]:
    """Compare our kind of arm with every other one, each at its best split."""
    arms = best(rows)
    if ours not in arms:
        return
    own = arms.pop(ours)
    for name, other in arms.items():
        ratio = own["tokens_per_second"] / other["tokens_per_second"]
        line = f"{ours} {own['split']} / {name:14s} {other['split']:>5s}  {ratio:5.2f}x"
        if not other["max_staleness"]:
            line += f"   {own['tokens_per_second'] / with_free_weights(other):5.2f}x were its weights there at once"
        yield line + ("" if ratio > 1 else "   LOSES")


def with_free_weights(row: Row) -> float:
    """Return the tokens per second that an arm would reach if weights reached the engines at the end of each step."""
    waiting = row["steps"] * (row["publish_seconds"] + row["load_seconds"])
    return float(row["tokens_per_second"] * row["window_seconds"] / max(row["window_seconds"] - waiting, 1e-9))


def broken_promises(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if "error" not in row and row["staleness_max"] > row["max_staleness"]:
            yield f"{row['name']}: staleness {row['staleness_max']} over the bound {row['max_staleness']}"
