"""Plot held-out reward against learning rate, a line for each staleness, a panel for each task.

    python -m benchmarks.old_tokens.plot docs/results/old_tokens.jsonl docs/results/old_tokens.png

Lines are means over seeds, and bars their standard errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 - the backend comes first

from benchmarks.gpu.rows import read  # noqa: E402
from benchmarks.old_tokens.cells import Row  # noqa: E402
from benchmarks.old_tokens.table import interval, select  # noqa: E402


def draw(rows: Sequence[Row], target: Path) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    ages = sorted({row["staleness"] for row in rows})
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.8), squeeze=False)
    colors = pyplot.get_cmap("viridis")
    for panel, task in zip(panels[0], tasks, strict=True):
        for place, age in enumerate(ages):
            arm = select(rows, task=task, staleness=age, guard="tis")
            rates = sorted({row["rate"] for row in arm})
            points = [interval([row["held_out"] for row in select(arm, rate=rate)]) for rate in rates]
            color = "black" if age == 0 else colors(0.9 * place / max(len(ages) - 1, 1))
            panel.errorbar(
                rates,
                [mean for mean, _ in points],
                yerr=[error for _, error in points],
                marker="o",
                capsize=3,
                color=color,
                label="synchronous" if age == 0 else f"{age} version{'s' * (age > 1)} old",
            )
        panel.set_xscale("log", base=2)
        ticks = sorted({row["rate"] for row in select(rows, task=task)})
        panel.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        panel.set_title(task)
        panel.set_xlabel("learning rate")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("held-out reward, equal samples")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
