"""The tables of the rows: means over seeds with standard errors, and paired differences with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

Row = dict[str, Any]

FASTER: Final = 1.8
"""Trained tokens a second, asynchronous by synchronous: 0.6B, 1 + 1 GPUs, nothing thrown away (performance.md)."""
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
_NORMAL: Final = 1.960


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error. The error of fewer than two values is nan.

    >>> interval([1.0, 3.0])
    (2.0, 1.0)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def quantile(freedom: float) -> float:
    """Return how many errors a 95 % interval reaches to each side. Of degrees of freedom that the table lacks it takes
    the next fewer, so an interval is rather too wide.

    >>> [quantile(freedom) for freedom in (2, 3.9, 50, math.inf)]
    [4.303, 3.182, 2.228, 1.96]
    """
    return _NORMAL if math.isinf(freedom) else _T[min(int(freedom + 1e-9), len(_T)) - 1]


def with_interval(mean: float, error: float, *, freedom: float) -> str:
    """Return a difference with its 95 % interval by Student's t.

    >>> with_interval(-0.07, 0.023, freedom=2)
    '-0.070 [-0.169, +0.029]'
    """
    wide = quantile(freedom) * error
    return f"{mean:+.3f} [{mean - wide:+.3f}, {mean + wide:+.3f}]"


def at_seconds(row: Row, *, faster: float) -> float:
    """Return the held-out reward when an asynchronous run, ``faster`` by that factor, has ended: interpolated.

    >>> at_seconds({"steps": 20, "curve": [[0, 0.0], [10, 0.5], [20, 0.7]]}, faster=4.0)
    0.25
    """
    wanted = row["steps"] / faster
    for (before, low), (after, high) in zip(row["curve"], row["curve"][1:], strict=False):
        if before <= wanted <= after:
            return float(low + (high - low) * (wanted - before) / (after - before))
    return float(row["held_out"])


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def paired(
    arm: Sequence[Row],
    control: Sequence[Row],
    *,
    of_control: Callable[[Row], float] = lambda row: float(row["held_out"]),
) -> list[float]:
    """Return arm - control of each seed, a mean over the tasks that both have: seeds are what is independent."""
    others = {(row["task"], row["seed"]): of_control(row) for row in control}
    of_seed: dict[int, list[float]] = {}
    for row in arm:
        if (row["task"], row["seed"]) in others:
            of_seed.setdefault(row["seed"], []).append(row["held_out"] - others[row["task"], row["seed"]])
    return [statistics.fmean(differences) for differences in of_seed.values()]


def print_tables(rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in tasks:
        print_rates(select(rows, task=task, guard="tis"), f"{task}: held-out reward")
    if len(tasks) > 1:
        print_rates(select(rows, guard="tis"), "mean of all tasks")
    _print_differences(select(rows, guard="tis"))
    _print_guards(rows)


def print_rates(rows: Sequence[Row], title: str) -> None:
    ages = sorted({row["staleness"] for row in rows})
    print(f"\n{title}\n\n| rate | " + " | ".join(f"staleness {age}" for age in ages) + " |")
    print("|---" * (len(ages) + 1) + "|")
    for rate in sorted({row["rate"] for row in rows}):
        cells = []
        for age in ages:
            found = select(rows, rate=rate, staleness=age)
            cells.append(_text(_by_seed(found)) if found else "")
        print(f"| {rate:g} | " + " | ".join(cells) + " |")


def _by_seed(rows: Sequence[Row]) -> list[float]:
    """Return the mean over tasks of each seed: seeds are what is independent."""
    seeds = sorted({row["seed"] for row in rows})
    return [statistics.fmean(row["held_out"] for row in select(rows, seed=seed)) for seed in seeds]


def _print_differences(rows: Sequence[Row]) -> None:
    print("\npaired difference from synchronous at the same rate over seeds (means of tasks): at equal samples, and at")
    print(
        f"equal seconds if an asynchronous run trains {FASTER} x the tokens\n\n| rate | staleness | samples | seconds |"
    )
    print("|---|---|---|---|")
    for rate in sorted({row["rate"] for row in rows}):
        control = select(rows, rate=rate, staleness=0)
        for age in sorted({row["staleness"] for row in rows} - {0}):
            arm = select(rows, rate=rate, staleness=age)
            samples = paired(arm, control)
            seconds = paired(arm, control, of_control=lambda row: at_seconds(row, faster=FASTER))
            if samples:
                print(f"| {rate:g} | {age} | {_difference(samples)} | {_difference(seconds)} |")


def _print_guards(rows: Sequence[Row]) -> None:
    guarded = [row for row in rows if row["guard"] != "tis"]
    for rate, age in sorted({(row["rate"], row["staleness"]) for row in guarded}):
        there = select(rows, rate=rate, staleness=age)
        default = select(there, guard="tis")
        sync = select(rows, rate=rate, staleness=0, guard="tis")
        tasks = list(dict.fromkeys(row["task"] for row in there))
        print(f"\nguards at {rate:g}, staleness {age}: held-out reward, and paired difference from tis\n")
        print(f"| guard | {' | '.join(tasks)} | difference |\n" + "|---" * (len(tasks) + 2) + "|")
        arms = [("synchronous", sync), *((g, select(there, guard=g)) for g in dict.fromkeys(r["guard"] for r in there))]
        arms.sort(key=lambda arm: -statistics.fmean([*paired(arm[1], default), *([] if arm[1] else [-9.0])] or [-9.0]))
        for name, arm in arms:
            cells = [_text([row["held_out"] for row in select(arm, task=task)]) for task in tasks]
            print(f"| {name} | {' | '.join(cells)} | {'' if name == 'tis' else _difference(paired(arm, default))} |")


def _text(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, error = interval(values)
    return f"{mean:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def _difference(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:+.3f}" for value in values)
    return with_interval(*interval(values), freedom=len(values) - 1)
