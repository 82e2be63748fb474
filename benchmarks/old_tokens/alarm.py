"""Try the drift alarm on recorded runs: how many that lost were reported, and when, and how many others.

    python -m benchmarks.old_tokens.alarm docs/results/gpu/learning*.jsonl         SmolLM2-135M, learning.py's rows
    python -m benchmarks.old_tokens.alarm docs/results/old_tokens.jsonl --lost 0.1 the tiny tasks, without guards

A run lost if its held-out reward is more than --lost below the mean of the synchronous runs that share its file (of
the tiny tasks: task, rate and seed).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.metrics.alarms import number_of
from asyncrl.metrics.drift import DriftAlarm
from benchmarks.gpu.rows import read
from benchmarks.old_tokens.cells import Row, distinct

THRESHOLDS: Final = (0.1, 0.2, 0.4)
FALL: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """
    among   runs that are compared with each other
    steps   offpolicy/k3, entropy of each step
    rewards  of each step; empty: not recorded
    cosine   of successive gradients, its mean over the run; nan: not recorded
    """

    arm: str
    among: str
    is_synchronous: bool
    held_out: float
    steps: Sequence[tuple[float, float]]
    rewards: Sequence[float] = ()
    cosine: float = math.nan

    def rang_at(self, threshold: float) -> int:
        """Return the first step with the alarm, from 1; 0 if there is none."""
        alarm = DriftAlarm(threshold)
        for step, (k3, entropy) in enumerate(self.steps, 1):
            alarm.update({"offpolicy/k3": k3, "entropy": entropy})
            if alarm.is_on:
                return step
        return 0

    @property
    def fell_at(self) -> int:
        """Return the first step at which the mean reward of five steps is FALL below its best; 0 if there is none."""
        means = [statistics.fmean(self.rewards[end - 5 : end]) for end in range(5, len(self.rewards) + 1)]
        best = itertools.accumulate(means, max)
        falls = (mean < high - FALL for mean, high in zip(means, best, strict=True))
        return next((step for step, falls_there in enumerate(falls, 5) if falls_there), 0)

    @property
    def largest(self) -> float:
        """Return the largest drift that lasted, as the alarm sees it."""
        found = [DriftAlarm(0.0).update({"offpolicy/k3": k3, "entropy": entropy}) for k3, entropy in self.steps]
        drifts = [number_of(one, "offpolicy/drift") for one in found]
        return max((statistics.median(drifts[i : i + 5]) for i in range(len(drifts) - 4)), default=0.0)


def recorded(path: Path) -> Iterator[Recorded]:
    """Yield the complete runs of a file of learning.py or of this benchmark."""
    rows = read(path)
    if not any("run" in row for row in rows):
        yield from of_table(distinct(rows))
        return
    starts = [index for index, row in enumerate(rows) if "run" in row]
    for begin, end in itertools.pairwise([*starts, len(rows)]):
        run = rows[begin]["run"]
        if run["is_complete"]:
            yield Recorded(
                arm=run["arm"],
                among=path.stem,
                is_synchronous=run["arm"] in ("sync", "async-0"),
                held_out=run["exam"]["held_out"],
                steps=[(row["k3"], row["entropy"]) for row in rows[begin + 1 : end]],
                rewards=[row["reward"] for row in rows[begin + 1 : end]],
            )


def of_table(rows: Sequence[Row]) -> list[Recorded]:
    """Return the runs of this benchmark without a guard."""
    return [of_row(row) for row in rows if row["guard"] == "tis"]


def of_row(row: Row) -> Recorded:
    cosines = row["metrics"].get("cosine", [])
    return Recorded(
        arm=f"{row['rate']:g} x {row['staleness']}",
        among=f"{row['task']} {row['rate']} {row['seed']}",
        is_synchronous=row["staleness"] == 0,
        held_out=row["held_out"],
        steps=list(zip(row["metrics"]["offpolicy/k3"], row["metrics"]["entropy"], strict=True)),
        cosine=statistics.fmean(cosines) if any(cosines) else math.nan,  # zeros: of a backend that shows no gradients
    )


def split(runs: Sequence[Recorded], *, by: float = 0.03) -> tuple[list[Recorded], list[Recorded]]:
    """Return the runs that lost, and the others; those without a synchronous run beside them are left out."""
    synchronous: dict[str, list[float]] = {}
    for run in runs:
        if run.is_synchronous:
            synchronous.setdefault(run.among, []).append(run.held_out)
    known = [run for run in runs if run.among in synchronous]
    lost = [run for run in known if run.held_out < statistics.fmean(synchronous[run.among]) - by]
    return lost, [run for run in known if run not in lost]


def auc(lost: Sequence[Recorded], others: Sequence[Recorded], of: Callable[[Recorded], float]) -> float:
    """Return the share of pairs, of a run that lost and another with old tokens on its task, in which the former has
    the larger value; .5 says nothing. nan without pairs."""
    pairs = [
        (of(one), of(other))
        for one, other in itertools.product(lost, others)
        if not other.is_synchronous and one.among.split()[0] == other.among.split()[0]
    ]
    return statistics.fmean((one > other) + (one == other) / 2 for one, other in pairs) if pairs else math.nan


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.old_tokens.alarm", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--lost", type=float, default=0.03, help="(default 0.03)")
    options = parser.parse_args(given)
    if missing := [path for path in options.files if not path.is_file()]:
        parser.error(f"{missing[0]}: no such file")
    logging.disable()
    runs = [run for path in options.files for run in recorded(path)]
    lost, others = split(runs, by=options.lost)
    print(f"{len(lost)} runs lost more than {options.lost} to synchronous ones, {len(others)} did not")
    synchronous = [run.largest for run in others if run.is_synchronous]
    print(f"largest lasting drift of a synchronous run: {max(synchronous):.3f}")
    print(f"AUC within a task, of runs with old tokens: largest drift {auc(lost, others, lambda run: run.largest):.2f}")
    if not math.isnan(sum(run.cosine for run in runs)):
        print(f"    cosine of successive gradients {auc(lost, others, lambda run: run.cosine):.2f}")
    for threshold in THRESHOLDS:
        steps = sorted(at for run in lost if (at := run.rang_at(threshold)))
        false = [run for run in others if run.rang_at(threshold)]
        print(f"over {threshold:g}: {len(steps)} of {len(lost)} that lost", end="")
        print(f", at step {statistics.median(steps):g} (median)" if steps else "", end="")
        print(f"; {len(false)} of {len(others)} others: {', '.join(sorted({run.arm for run in false})) or 'none'}")
        if fell := [run for run in lost if run.fell_at]:
            before = sum(0 < run.rang_at(threshold) <= run.fell_at for run in fell)
            print(f"    of {len(fell)} of them whose reward fell by {FALL:g}, {before} were reported before it did")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
