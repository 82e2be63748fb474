"""Plot the results of pipeline.py.

    python -m benchmarks.plot_pipeline docs/results/pipeline.jsonl docs/results/pipeline.png

Top: tokens trained per second over the split of the machines; lines are the simulation's, dots the real loop's.
Bottom: how the learner's machines spend their time in each mode at its best split.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 - the backend comes first

Row = dict[str, Any]

COLORS: Final = {"sync": "#9a9a9a", "one_step_off": "#e0a030", "async": "#2a6fbb"}
NAMES: Final = {"sync": "synchronous", "one_step_off": "one step off", "async": "asynchronous"}
TITLES: Final = {
    "lognormal": "lognormal lengths (σ = 1)",
    "pareto": "Pareto lengths (1.6)",
    "constant": "all answers equally long",
}


def draw(rows: Sequence[Row], target: Path) -> None:
    kinds = list(dict.fromkeys(row["lengths"] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(kinds), figsize=(4.6 * len(kinds), 6.6), height_ratios=(3, 1.4), sharey="row", squeeze=False
    )
    for column, kind in enumerate(kinds):
        of_kind = [row for row in rows if row["lengths"] == kind]
        draw_splits(axes[0, column], of_kind)
        draw_learner(axes[1, column], of_kind)
        axes[0, column].set_title(TITLES[kind])
    axes[0, 0].set_ylabel("tokens trained per second")
    axes[0, 0].set_ylim(bottom=0)
    style: dict[str, Any] = {"frameon": False, "ncols": 4, "fontsize": 9}
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", **style)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="lower center", **style)
    figure.tight_layout(rect=(0, 0.04, 1, 0.96))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def draw_splits(axes: Any, rows: Sequence[Row]) -> None:
    machines = rows[0]["machines"]
    for mode, color in COLORS.items():
        of_mode = [row for row in rows if row["mode"] == mode]
        apart = [row for row in of_mode if not row["is_colocated"]]
        if apart:
            ideal = apart[0]["ideal_by_workers"]
            axes.plot([int(workers) for workers in ideal], list(ideal.values()), color=color, linewidth=1.2)
            axes.plot(
                [row["workers"] for row in apart],
                [row["tokens_per_second"] for row in apart],
                "o",
                color=color,
                label=f"{NAMES[mode]} (staleness ≤ {apart[0]['max_staleness']})",
            )
        for row in of_mode:
            if row["is_colocated"]:
                axes.axhline(row["ideal_tokens_per_second"], color=color, linewidth=1.2, linestyle=":")
                axes.plot(machines, row["tokens_per_second"], "s", color=color, label="synchronous, colocated")
    axes.set_xlabel(f"rollout workers of {machines} machines")
    axes.set_xticks(range(1, machines + 1), [*map(str, range(1, machines)), "all"])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f} k")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_learner(axes: Any, rows: Sequence[Row]) -> None:
    arms = [
        max((row for row in rows if row["mode"] == mode), key=lambda row: row["tokens_per_second"])
        for mode in COLORS
        if any(row["mode"] == mode for row in rows)
    ]
    names = [NAMES[row["mode"]] for row in arms]
    waits, overheads = [row["learner_idle"] for row in arms], [row["learner_overhead"] for row in arms]
    trains = [1 - wait - overhead for wait, overhead in zip(waits, overheads, strict=True)]
    start = [0.0] * len(arms)
    for values, label, color in (
        (trains, "learner trains", "#3c8d5a"),
        (overheads, "overhead (not scaled with the simulation)", "#c9c9c9"),
        (waits, "learner waits for data", "#c8503c"),
    ):
        axes.barh(names, values, left=start, label=label, color=color, height=0.6)
        start = [left + value for left, value in zip(start, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    draw([json.loads(line) for line in source.read_text().splitlines()], target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
