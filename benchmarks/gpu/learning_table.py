"""Table of the results of learning.py.

    python -m benchmarks.gpu.learning_table docs/results/gpu/learning.jsonl

Means over seeds, with their standard errors; rewards are smoothed over the last five steps. Held-out problems are
answered by the last weights. If an arm and seed have several runs, the last of the longest counts. Runs cut short
before LEAST_SHARE of the longest are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Array = NDArray[np.float64]

SMOOTHING: Final = 5
FINAL_SHARE: Final = 0.2
REACH: Final = 0.9
LEAST_SHARE: Final = 0.8

ARMS: Final = (
    "sync",
    "async-0",
    "async-4-tis",
    "async-4-none",
    "async-8-tis",
    "async-16-tis",
    "async-16-none",
    "async-4-ess",
)
"""In the order of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run of one arm, with numbers for each step.

    held_out  share that its last weights got right; nan if not examined
    """

    arm: str
    seed: int
    max_staleness: int
    held_out: float
    rows: Sequence[Row]

    def of(self, name: str) -> Array:
        """Return a number for each step; nan where a step lacks it."""
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], np.float64)

    def smooth(self) -> Array:
        """Mean reward of each step and those just before it."""
        sums = np.cumsum(np.concatenate([[0.0], self.of("reward")]))
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - SMOOTHING, 0)
        means: Array = (sums[ends] - sums[starts]) / (ends - starts)
        return means

    def at(self, seconds: Array) -> Array:
        """Return the smoothed reward at these times; before the end of the first step, that step's reward."""
        rewards: Array = np.interp(seconds, self.of("seconds"), self.smooth())
        return rewards

    def seconds_to(self, reward: float) -> float:
        """Return when the smoothed reward first reached a value, with enough steps to smooth over; nan if never."""
        there = np.flatnonzero(self.smooth()[SMOOTHING - 1 :] >= reward)
        return float(self.of("seconds")[SMOOTHING - 1 + there[0]]) if len(there) else float("nan")


Arms = dict[str, list[Curve]]


def read(paths: Sequence[Path]) -> Arms:
    """Return curves by arm, in the order of ARMS. Unknown arms are left out."""
    found: dict[tuple[str, int], Curve] = {}
    for about, rows in runs(json.loads(line) for path in paths for line in path.read_text().splitlines()):
        curve = Curve(
            arm=about["arm"],
            seed=about["seed"],
            max_staleness=int(about["settings"]["staleness.max_staleness"]),
            held_out=float(about.get("exam", {}).get("held_out", np.nan)),
            rows=rows,
        )
        known = found.get((curve.arm, curve.seed))
        if rows and (known is None or len(rows) >= len(known.rows)):
            found[curve.arm, curve.seed] = curve
    least = LEAST_SHARE * max((len(curve.rows) for curve in found.values()), default=0)
    arms: Arms = {arm: [] for arm in ARMS}
    for (arm, seed), curve in sorted(found.items()):
        if len(curve.rows) < least:
            print(f"left out: {arm}, seed {seed}, which has {len(curve.rows)} steps")
        elif arm in arms:
            arms[arm].append(curve)
    return {arm: curves for arm, curves in arms.items() if curves}


def runs(rows: Iterator[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """Yield each run's description, and its steps, which follow the description in the file."""
    found: list[tuple[Row, list[Row]]] = []
    for row in rows:
        if "run" in row:
            found.append((row["run"], []))
        else:
            found[-1][1].append(row)
    return iter(found)


def mean_and_error(values: Array) -> tuple[Array, Array]:
    """Return mean and standard error over the first axis, [S, ...] -> [...], [...]. The error of one seed is nan."""
    if len(values) < 2:
        return values.mean(0), np.full(values.shape[1:], np.nan)
    return values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values))


HEAD: Final = (
    "arm            seeds  samples  reward at the end  held out         minus sync, {measure:9s}  s/step"
    "  seconds to {goal:.2f}  at {time:.0f} s  staleness mean   ess  entropy  dropped"
)


def table(arms: Arms) -> Iterator[str]:
    """Yield the lines of the table. Reward: over the last fifth of the samples that every run has. Seconds to: 0.9 of
    the first arm's reward."""
    steps = min(len(curve.rows) for curves in arms.values() for curve in curves)
    rewards = {arm: mean_and_error(np.array([final(curve, steps) for curve in curves])) for arm, curves in arms.items()}
    exams = {arm: mean_and_error(np.array([curve.held_out for curve in curves])) for arm, curves in arms.items()}
    has_exams = all(np.isfinite(mean) for mean, _ in exams.values())
    compared = exams if has_exams else rewards
    reference = next(iter(arms))
    goal = REACH * float(rewards[reference][0])
    time = min(float(curve.of("seconds")[-1]) for curves in arms.values() for curve in curves)
    yield HEAD.format(goal=goal, time=time, measure="held out" if has_exams else "reward")
    for arm, curves in arms.items():
        reached = [seconds for curve in curves if np.isfinite(seconds := curve.seconds_to(goal))]
        then, _ = mean_and_error(np.array([curve.at(np.array([time]))[0] for curve in curves]))
        staleness = _mean(curves, "staleness_mean")
        is_fresh = curves[0].max_staleness > 0 and staleness < curves[0].max_staleness / 2
        yield (
            f"{arm:14s}  {len(curves):4d}  {curves[0].rows[steps - 1]['samples']:7d}"
            f"  {_pair(rewards[arm]):17s}  {_pair(exams[arm]):15s}"
            f"  {difference(compared[arm], compared[reference]) if arm != reference else '':21s}"
            f"  {np.mean([curve.of('seconds')[-1] / len(curve.rows) for curve in curves]):6.2f}"
            f"  {np.mean(reached) if reached else np.nan:8.0f} ({len(reached)}/{len(curves)})"
            f"  {then:8.3f}  {staleness:13.2f}{'*' if is_fresh else ' '}  {_mean(curves, 'ess'):4.2f}"
            f"  {_mean(curves, 'entropy'):7.3f}  {np.mean([curve.of('dropped_groups')[-1] for curve in curves]):7.0f}"
        )
    yield "* the lag stayed below half of what was allowed: this arm says little about samples that old"


def _pair(value: tuple[Array, Array]) -> str:
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def final(curve: Curve, steps: int) -> float:
    last = max(1, round(FINAL_SHARE * steps))
    return float(curve.of("reward")[steps - last : steps].mean())


def difference(ours: tuple[Array, Array], others: tuple[Array, Array]) -> str:
    """Return the difference with its standard error, and whether it is more than one standard error."""
    gap, error = float(ours[0] - others[0]), float(np.hypot(ours[1], others[1]))
    verdict = "" if not np.isfinite(error) else "  within" if abs(gap) <= error else "  above" if gap > 0 else "  BELOW"
    return f"{gap:+.3f} ± {error:.3f}{verdict}"


def _mean(curves: Sequence[Curve], name: str) -> float:
    """Return the mean over the later half of the steps, where the window is filled; nan if no step has the number."""
    values = np.concatenate([curve.of(name)[len(curve.rows) // 2 :] for curve in curves])
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.learning_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="+", type=Path, help="JSON lines of learning.py")
    options = parser.parse_args(given)
    arms = read(options.rows)
    if not arms:
        parser.error("no run in there has a step")
    print(*table(arms), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
