"""Equal seconds as they were measured: recorded runs of the real loop (benchmarks.gpu.learning), synchronous and not.

    python -m benchmarks.old_tokens.seconds

At the second in which an asynchronous run ended, how much reward had it, and how much the synchronous run of its seed,
which ran beside it? Both as the mean over the last five batches that were trained until then. An asynchronous run's
batches were sampled by older weights, so this is rather against it. Seconds count from the first token.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.plot_learning import runs
from benchmarks.old_tokens.cells import Row
from benchmarks.old_tokens.table import interval, with_interval

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results" / "gpu"
TASKS: Final = {
    "learning": "sums of three numbers",
    "learning_8": "sums of three numbers",
    "learning_mixed": "three kinds of arithmetic",
    "learning_rate": "sums of three numbers",
    "learning_large_rate": "sums of two to four numbers",
}
"""By the name of the file."""
_LAST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs of one file with a learning rate and a bound, beside the synchronous ones of their seeds.

    rewards  of each seed: asynchronous, and synchronous by then
    steps    the same of steps taken
    age      of the trained tokens, in versions: mean over steps and seeds
    """

    rate: float
    bound: int
    task: str
    rewards: Sequence[tuple[float, float]]
    steps: Sequence[tuple[int, int]]
    age: float


def arms(recorded: Sequence[tuple[Row, Sequence[Row]]], *, task: str) -> list[Arm]:
    """Return the arms with TIS, of complete runs whose synchronous one lasted as long.

    recorded  of each run what it was, and its steps
    """
    longest: dict[int, Sequence[Row]] = {}
    for about, steps in recorded:
        if about["arm"] == "sync" and len(steps) > len(longest.get(about["seed"], ())):
            longest[about["seed"]] = steps
    found: dict[tuple[float, int], list[tuple[Sequence[Row], Sequence[Row]]]] = {}
    for about, steps in recorded:
        control = longest.get(about["seed"], [])
        if about["arm"].endswith("-tis") and about["is_complete"] and control:
            by_then = [row for row in control if row["seconds"] <= steps[-1]["seconds"]]
            if len(by_then) < len(control):
                found.setdefault(_place(about["settings"]), []).append((steps, by_then))
    return [
        Arm(
            rate=rate,
            bound=bound,
            task=task,
            rewards=[(_at_the_end(ours), _at_the_end(theirs)) for ours, theirs in of],
            steps=[(len(ours), len(theirs)) for ours, theirs in of],
            age=statistics.fmean(row["staleness_mean"] for ours, _ in of for row in ours),
        )
        for (rate, bound), of in found.items()
    ]


def _place(settings: Mapping[str, str]) -> tuple[float, int]:
    return float(settings["learner.learning_rate"]), int(settings["staleness.max_staleness"])


def _at_the_end(steps: Sequence[Row]) -> float:
    return statistics.fmean(row["reward"] for row in steps[-_LAST:])


def table(found: Sequence[Arm]) -> str:
    """Return the table in Markdown, the smallest learning rate x bound first."""
    lines = [
        "| rate | bound | mean age | task | seeds | steps: asynchronous, synchronous | reward | difference |",
        "|---" * 8 + "|",
    ]
    for arm in sorted(found, key=lambda arm: (arm.rate * arm.bound, arm.rate)):
        rewards, steps = (tuple(map(statistics.fmean, zip(*pairs, strict=True))) for pairs in (arm.rewards, arm.steps))
        mean, error = interval([ours - theirs for ours, theirs in arm.rewards])
        lines.append(
            f"| {arm.rate:g} | ≤ {arm.bound} | {arm.age:.1f} | {arm.task} | {len(arm.rewards)} | {steps[0]:.0f}, "
            f"{steps[1]:.0f} | {rewards[0]:.3f}, {rewards[1]:.3f} | "
            f"{with_interval(mean, error, freedom=len(arm.rewards) - 1)} |"
        )
    return "\n".join(lines)


def of_files(folder: Path = RESULTS) -> str:
    found: list[Arm] = []
    for name, task in TASKS.items():
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        found += arms(list(runs(map(json.loads, lines))), task=task)
    return table(found)


if __name__ == "__main__":
    print(of_files())
