"""Table and plot of the results of learning.py.

    python -m benchmarks.gpu.plot_learning docs/results/gpu/learning.jsonl docs/results/gpu/learning.png

Left: reward over the number of samples that the sampling weights had been trained on. Right: reward over seconds since
the first token, at the time of training. Lines are means over seeds, each smoothed over its last five steps. Bands are
one standard error. Dots are held-out problems, answered by the last weights. If an arm and seed have several runs, the
last of the longest counts. Runs cut short before LEAST_SHARE of the longest are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
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

STYLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "sync": ("#7a7a7a", "-", "synchronous"),
    "async-0": ("#111111", ":", "asynchronous, staleness 0"),
    "async-4-tis": ("#2a6fbb", "-", "staleness ≤ 4, TIS"),
    "async-4-none": ("#2a6fbb", "--", "staleness ≤ 4, no correction"),
    "async-8-tis": ("#b08a2e", "-", "staleness ≤ 8, TIS"),
    "async-16-tis": ("#c8503c", "-", "staleness ≤ 16, TIS"),
    "async-16-none": ("#c8503c", "--", "staleness ≤ 16, no correction"),
    "async-4-ess": ("#7b4fa3", "-", "staleness ≤ 4, TIS, learning rate × √ESS"),
}
"""Colour, line style and name of each arm, in the order of the legend."""


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

    def learned(self) -> Array:
        """Samples that the sampling weights of each step had been trained on, mean over its tokens; never decreases."""
        steps = self.of("step")
        versions = np.maximum.accumulate(steps - 1 - np.nan_to_num(self.of("staleness_mean")))
        learned: Array = versions * self.of("samples") / steps
        return learned

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
    """Return curves by arm, in the order of STYLES. Unknown arms are left out."""
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
    arms: Arms = {arm: [] for arm in STYLES}
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


# -- table -------------------------------------------------------------------------------------------------------------

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


# -- picture -----------------------------------------------------------------------------------------------------------


def draw(arms: Arms, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.6), sharey=True)
    for arm, curves in arms.items():
        band(left, arm, *by_samples(curves))
        dot(left, arm, curves, place=1.0 + 0.01 * list(arms).index(arm))
        band(right, arm, *by_seconds(curves))
    left.set_xlabel("samples learned from before")
    left.set_ylabel("share of right answers")
    right.set_xlabel("seconds since the first token")
    left.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    seeds = max(map(len, arms.values()))
    figure.suptitle(f"SmolLM2-135M-Instruct, GRPO, {seeds} seed{'s' if seeds > 1 else ''}", fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="lower center", ncols=3, fontsize=9)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def by_samples(curves: Sequence[Curve]) -> tuple[Array, Array, Array]:
    """Return samples learned from, mean reward, standard error, up to where every seed got."""
    samples = np.linspace(0.0, min(curve.learned()[-1] for curve in curves), 200)
    rewards = [np.interp(samples, curve.learned(), curve.smooth()) for curve in curves]
    return samples, *mean_and_error(np.array(rewards))


def by_seconds(curves: Sequence[Curve]) -> tuple[Array, Array, Array]:
    """Return seconds, mean reward, standard error, from where every seed has a step to where the first seed ends."""
    begin = max(curve.of("seconds")[0] for curve in curves)
    end = min(curve.of("seconds")[-1] for curve in curves)
    seconds = np.linspace(begin, end, 200)
    return seconds, *mean_and_error(np.array([curve.at(seconds) for curve in curves]))


def band(axes: Any, arm: str, x: Array, mean: Array, error: Array) -> None:
    color, style, name = STYLES[arm]
    axes.plot(x, mean, color=color, linestyle=style, linewidth=1.6, label=name)
    if np.isfinite(error).all():
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.12, linewidth=0)


def dot(axes: Any, arm: str, curves: Sequence[Curve], *, place: float) -> None:
    """Draw the dots of an arm.

    place  horizontal place, so that dots stand side by side after the end of the curves
    """
    mean, error = mean_and_error(np.array([curve.held_out for curve in curves]))
    samples = place * np.mean([curve.of("samples")[-1] for curve in curves])
    axes.errorbar(samples, mean, yerr=np.nan_to_num(error), fmt="o", markersize=4, color=STYLES[arm][0], capsize=2)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.plot_learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="+", type=Path, help="JSON lines of learning.py")
    parser.add_argument("picture", type=Path, help="file to write, .png")
    options = parser.parse_args(given)
    arms = read(options.rows)
    if not arms:
        parser.error("no run in there has a step")
    print(*table(arms), sep="\n")
    draw(arms, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
