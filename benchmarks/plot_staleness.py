"""Plot the results of staleness_bus.py.

    python -m benchmarks.plot_staleness docs/results/staleness_bus.jsonl docs/results/staleness.png

The expected reward of every arm, the staleness of the trained tokens in two of them, and the reward over seconds of the
arm that takes time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 - the backend comes first

Row = dict[str, Any]

COLORS: Final = {
    "sync": "#9a9a9a",
    "tis_token": "#2a6fbb",
    "none": "#c8503c",
    "recomputed": "#e0a030",
    "shuffled": "#8a5fa8",
    "shifted": "#6b4a3a",
    "small": "#5aa9a0",
}
NAMES: Final = {
    "sync": "synchronous",
    "tis_token": "lag 16, tis_token",
    "none": "lag 16, no correction",
    "recomputed": "lag 16, behavior logprobs recomputed",
    "shuffled": "lag 16, behavior logprobs shuffled",
    "shifted": "lag 16, behavior logprobs shifted",
    "small": "bound 1",
}
TIMED: Final = ("small",)


def draw(rows: Sequence[Row], target: Path) -> None:
    arms = {name: mine for name in COLORS if (mine := [row for row in rows if row["arm"] == name])}
    figure, (rewards, lags, speeds) = pyplot.subplots(1, 3, figsize=(14, 3.8))
    draw_rewards(rewards, {name: mine for name, mine in arms.items() if name not in TIMED})
    draw_lags(lags, {name: arms[name] for name in ("tis_token", *TIMED) if name in arms})
    draw_speeds(speeds, {name: arms[name] for name in TIMED if name in arms})
    for axes in (rewards, lags, speeds):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    rewards.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)  # no room inside
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def draw_rewards(axes: Any, arms: dict[str, list[Row]]) -> None:
    """Plot the mean over seeds as a line, with a band from the lowest to the highest."""
    for name, mine in arms.items():
        curves = np.array([row["curve"] for row in mine])
        steps = np.linspace(0, mine[0]["steps"], curves.shape[1])
        axes.plot(steps, curves.mean(0), color=COLORS[name], label=NAMES[name])
        axes.fill_between(steps, curves.min(0), curves.max(0), color=COLORS[name], alpha=0.15, linewidth=0)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("expected reward")


def draw_lags(axes: Any, arms: dict[str, list[Row]]) -> None:
    width = 0.8 / len(arms)
    for place, (name, mine) in enumerate(arms.items()):
        shares = _histogram(mine)
        axes.bar(
            np.arange(len(shares)) + (place + 0.5) * width - 0.4, shares, width, color=COLORS[name], label=NAMES[name]
        )
    axes.set_xlabel("staleness, policy versions")
    axes.set_ylabel("share of the trained tokens")
    axes.set_xticks(range(0, 17, 2))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _histogram(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return the shares of the tokens by lag, f64[lags]."""
    counts = np.array([row["lag_histogram"] for row in rows]).sum(0)
    return np.asarray(counts / counts.sum())


def draw_speeds(axes: Any, arms: dict[str, list[Row]]) -> None:
    for name, mine in arms.items():
        for row in mine:
            label = f"{NAMES[name]}: {np.mean([r['steps_per_second'] for r in mine]):.1f} steps/s"
            axes.plot(
                [0, *row["seconds"]],
                row["curve"],
                color=COLORS[name],
                label=label if row is mine[0] else "_",
                alpha=0.8,
            )
    axes.set_xlabel("seconds")
    axes.set_ylabel("expected reward")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    draw([json.loads(line) for line in source.read_text().splitlines()], target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
