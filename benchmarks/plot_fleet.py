"""Plot the results of fleet.py.

    python -m benchmarks.plot_fleet docs/results/fleet_same_each.jsonl docs/results/fleet_same_each.png

Left: CPU per trajectory by part, over the size of the fleet. Middle: messages at the server. Right: memory. The filled
area is the cost of waiting workers, divided by the trajectories of this load. The band is the smallest fleet's cost,
plus and minus 20 %.
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

COLORS: Final = {"server": "#2a6fbb", "workers": "#e0a030", "learner": "#4a9a5a", "watcher": "#9a9a9a"}
NAMES: Final = {"server": "nats-server", "workers": "all workers", "learner": "learner", "watcher": "watcher"}
FLAT: Final = 0.2


def draw(rows: Sequence[Row], target: Path) -> None:
    sizes = [row["workers"] for row in rows]
    figure, (cpu, messages, memory) = pyplot.subplots(1, 3, figsize=(13.5, 4.2))
    for part, color in COLORS.items():
        work = [row["work"]["cpu_milliseconds"][part] for row in rows]
        whole = [row["whole"]["cpu_milliseconds"][part] for row in rows]
        cpu.plot(sizes, work, "o-", color=color, label=f"{NAMES[part]}: the work")
        cpu.plot(sizes, whole, "--", color=color, alpha=0.7)
        megabytes = [row["memory"][part]["max_megabytes"] for row in rows]
        memory.plot(sizes, megabytes, "o-", color=color, label=NAMES[part])
    cpu.plot([], [], "--", color="#555555", label="with presence")
    cpu.set_title("CPU ms per trajectory")
    _over_presence(messages, rows)
    messages.set_title("messages per trajectory at the server, in and out")
    memory.set_yscale("log")
    memory.set_title("MB at most")
    for axes in (cpu, messages, memory):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("rollout workers")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (cpu, messages):
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _over_presence(axes: Any, rows: Sequence[Row]) -> None:
    sizes = [row["workers"] for row in rows]
    work, whole = ([row[kind]["messages"] for row in rows] for kind in ("work", "whole"))
    axes.axhspan((1 - FLAT) * work[0], (1 + FLAT) * work[0], color="#dddddd", label="the smallest fleet's ± 20 %")
    axes.plot(sizes, work, "o-", color=COLORS["server"], label="the work")
    axes.fill_between(sizes, work, whole, color=COLORS["server"], alpha=0.2, label="presence at this load")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    draw(sorted((row for row in rows if "workers" in row), key=lambda row: row["workers"]), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
