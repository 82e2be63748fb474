"""Draw docs/figures/flow.png: who sends what to whom.

python docs/figures/flow.py            needs matplotlib
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

PICTURE: Final = Path(__file__).with_suffix(".png")
INK, MUTED, LINE = "#1f2933", "#616e7c", "#9aa5b1"
LEARNER, BUS, WORKER = "#dbe9f6", "#fdf0d5", "#dff0e0"
ROWS: Final = {"prompts": 4.55, "trajectories": 3.05, "weights": 1.55}
"""Height of each topic; its arrows run along it."""


def box(axes: Any, left: float, bottom: float, width: float, height: float, *, color: str, edge: str = LINE) -> None:
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=shape, fc=color, ec=edge, lw=1.2))


def text(axes: Any, x: float, y: float, words: str, *, size: float = 10, bold: bool = False, color: str = INK) -> None:
    weight = "bold" if bold else "normal"
    axes.text(x, y, words, ha="center", va="center", fontsize=size, weight=weight, color=color, linespacing=1.35)


def part(axes: Any, left: float, y: float, width: float, name: str, does: str) -> None:
    box(axes, left, y - 0.5, width, 1.0, color="white")
    text(axes, left + width / 2, y + 0.2, name, bold=True)
    text(axes, left + width / 2, y - 0.2, does, size=8.5, color=MUTED)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.5, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def draw(axes: Any) -> None:
    box(axes, 0.0, 0.4, 4.0, 5.6, color=LEARNER)
    box(axes, 5.0, 0.4, 2.6, 5.6, color=BUS)
    for shift in (0.24, 0.12, 0.0):
        box(axes, 8.6 + shift, 0.4 - shift, 4.0, 5.6, color=WORKER)
    text(axes, 2.0, 5.55, "learner", size=13, bold=True)
    text(axes, 6.3, 5.55, "bus (NATS)", size=13, bold=True)
    text(axes, 10.6, 5.55, "rollout worker × N", size=13, bold=True)

    part(axes, 0.3, ROWS["prompts"], 3.4, "PromptSource", "bounded window of groups")
    part(axes, 0.3, ROWS["trajectories"], 3.4, "Learner", "buffer → batch → advantages")
    part(axes, 0.3, ROWS["weights"], 3.4, "Backend (Megatron-Core)", "step n makes version n")
    part(axes, 8.9, ROWS["prompts"], 3.4, "RolloutWorker", "rollout function, reward")
    part(axes, 8.9, ROWS["trajectories"], 3.4, "Engine (SGLang)", "tokens, logprobs, version per token")
    part(axes, 8.9, ROWS["weights"], 3.4, "WeightFollower", "loads between two tokens")

    for topic, kind in (
        ("prompts", "work queue"),
        ("trajectories", "log, read by cursor"),
        ("weights", "latest version"),
    ):
        part(axes, 5.2, ROWS[topic], 2.2, topic, kind)

    arrow(axes, (3.7, ROWS["prompts"]), (5.2, ROWS["prompts"]))
    arrow(axes, (7.4, ROWS["prompts"]), (8.9, ROWS["prompts"]))
    arrow(axes, (8.9, ROWS["prompts"] - 0.4), (7.4, ROWS["trajectories"] + 0.3))
    arrow(axes, (5.2, ROWS["trajectories"]), (3.7, ROWS["trajectories"]))
    arrow(axes, (3.7, ROWS["weights"]), (5.2, ROWS["weights"]))
    arrow(axes, (7.4, ROWS["weights"]), (8.9, ROWS["weights"]))
    arrow(axes, (2.0, ROWS["trajectories"] - 0.5), (2.0, ROWS["weights"] + 0.5))
    arrow(axes, (2.0, ROWS["trajectories"] + 0.5), (2.0, ROWS["prompts"] - 0.5))
    arrow(axes, (10.6, ROWS["weights"] + 0.5), (10.6, ROWS["trajectories"] - 0.5))
    arrow(axes, (10.3, ROWS["prompts"] - 0.5), (10.3, ROWS["trajectories"] + 0.5))
    arrow(axes, (10.9, ROWS["trajectories"] + 0.5), (10.9, ROWS["prompts"] - 0.5))
    text(axes, 2.95, 3.8, "trained or dropped:\nroom for more", size=8, color=MUTED)
    text(axes, 2.5, 2.3, "packed\nbatch", size=8, color=MUTED)
    text(axes, 11.35, 2.3, "pause, load", size=8, color=MUTED)
    text(axes, 2.0, 0.7, "also: progress, metrics, checkpoint", size=8.5, color=MUTED)
    text(axes, 6.3, 0.7, "weights: file, NCCL or bus", size=8, color=MUTED)
    text(axes, 10.6, 0.7, "starts and ends at any time", size=8.5, color=MUTED)


def main() -> None:
    figure, axes = plt.subplots(figsize=(11.2, 5.6))
    axes.set_xlim(-0.1, 13.0)
    axes.set_ylim(0.0, 6.15)
    axes.axis("off")
    draw(axes)
    figure.savefig(
        PICTURE, dpi=130, bbox_inches="tight", pad_inches=0.05, facecolor="white", metadata={"Software": None}
    )


if __name__ == "__main__":
    main()
