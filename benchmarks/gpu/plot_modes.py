"""Plot the results of modes.py.

    python -m benchmarks.gpu.plot_modes docs/results/gpu/modes.jsonl docs/results/gpu/modes.png

There is a column for each model, number of GPUs and longest answer. Top: tokens trained per second; a bar is an arm at
its best split, dots are its other splits, settings and runs. Bottom: the share of time in which the arm's learner and
engines were idle.
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

from benchmarks.gpu.window import Row, best  # noqa: E402

NAMES: Final = {
    "sync": "synchronous",
    "sync_colocated": "synchronous,\ncolocated",
    "one_step_off": "one step off",
    "async_drain": "asynchronous,\ndrained",
    "async_drop": "asynchronous,\ndrops late",
    "async": "asynchronous,\nwaits for late",
}
COLORS: Final = {
    "sync": "#9a9a9a",
    "sync_colocated": "#6f6f6f",
    "one_step_off": "#e0a030",
    "async_drain": "#7fb0dc",
    "async_drop": "#5590cc",
    "async": "#2a6fbb",
}


def draw(rows: Sequence[Row], target: Path) -> None:
    good = [row for row in rows if "error" not in row]
    columns = sorted({_column(row) for row in good}, key=lambda column: (-column[1], column))
    rows_of = [[row for row in good if _column(row) == column] for column in columns]
    arms_of = [[arm for arm in NAMES if arm in best(of_column)] for of_column in rows_of]
    widths = [1.0 + 1.15 * len(arms) for arms in arms_of] or [1.0]
    figure, axes = pyplot.subplots(
        2, len(widths), figsize=(sum(widths), 6.6), height_ratios=(3, 1.6), width_ratios=widths, squeeze=False
    )
    for column, (model, gpus, length_max, device) in enumerate(columns):
        of_column, arms = rows_of[column], arms_of[column]
        draw_speeds(axes[0, column], of_column, arms)
        draw_idle(axes[1, column], of_column, arms)
        axes[0, column].set_title(f"{model}, {gpus} x {device}, answers up to {length_max:,}", fontsize=10)
    axes[0, 0].set_ylabel("tokens trained per second")
    axes[1, 0].set_ylabel("had nothing to do")
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _column(row: Row) -> tuple[str, int, int, str]:
    return row["model"], row["gpus"], row["length_max"], row["device"].removeprefix("NVIDIA ")


def draw_speeds(axes: Any, rows: Sequence[Row], arms: Sequence[str]) -> None:
    found = best(rows)
    speeds = [found[arm]["tokens_per_second"] for arm in arms]
    bars = axes.bar([NAMES[arm] for arm in arms], speeds, color=[COLORS[arm] for arm in arms], width=0.6)
    axes.bar_label(bars, [f"{found[arm]['tokens_per_second'] / 1000:.1f} k\n{found[arm]['split']}" for arm in arms])
    others = [row for row in rows if row["arm"] in arms and row is not found[row["arm"]]]
    axes.plot(
        [arms.index(row["arm"]) for row in others],
        [row["tokens_per_second"] for row in others],
        "o",
        color="black",
        markersize=4,
        label="other splits, settings and runs",
    )
    if others:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.set_ylim(0, 1.2 * max(speeds, default=1.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_idle(axes: Any, rows: Sequence[Row], arms: Sequence[str]) -> None:
    found = best(rows)
    for place, (key, label, color) in enumerate(
        (("learner_idle", "learner", "#c8503c"), ("engine_idle", "engines", "#3c8d5a"))
    ):
        values = [found[arm][key] for arm in arms]
        bars = axes.bar([number + 0.3 * (place - 0.5) for number in range(len(arms))], values, 0.28, color=color)
        bars.set_label(label)
        axes.bar_label(bars, [f"{value:.0%}" for value in values], fontsize=8)
    axes.set_xticks(range(len(arms)), [NAMES[arm] for arm in arms], fontsize=9)
    axes.set_ylim(0, 1.15)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, fontsize=9, ncols=2)
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
