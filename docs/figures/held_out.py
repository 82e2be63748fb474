"""Draws reward and held-out evaluation of a run.

python docs/figures/held_out.py docs/results/gpu/smollm2_sums.jsonl docs/figures/held_out.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 - the backend comes first


def draw(rows: list[dict[str, Any]], *, dataset: str, samples: int, path: Path) -> None:
    """rows: of metrics.jsonl"""
    mean, solved = f"evaluation/{dataset}/mean@{samples}", f"evaluation/{dataset}/pass@{samples}"
    trained = [row for row in rows if "reward/mean" in row]
    evaluated = sorted((row for row in rows if mean in row), key=lambda row: int(row["step"]))
    steps = [row["step"] for row in evaluated]
    figure, axes = pyplot.subplots(figsize=(7.0, 3.4), layout="constrained")
    axes.plot(
        [row["step"] for row in trained],
        [row["reward/mean"] for row in trained],
        color="#b9c4d0",
        linewidth=1.2,
        label="reward of each batch",
    )
    low, high = ([row[f"{mean}/{end}"] for row in evaluated] for end in ("low", "high"))
    axes.fill_between(steps, low, high, color="#2a6fbb", alpha=0.18, linewidth=0)
    axes.plot(steps, [row[mean] for row in evaluated], "o-", color="#2a6fbb", label=f"held out, mean@{samples}")
    axes.plot(steps, [row[solved] for row in evaluated], ".--", color="#3d8f5b", label=f"held out, pass@{samples}")
    axes.set(xlabel="step", ylabel="right", ylim=(0, 1.02), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=160)


def main() -> None:
    source, destination = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    draw(rows, dataset="held_out", samples=4, path=destination)


if __name__ == "__main__":
    main()
