"""What the rows of a real model say: which runs lost to synchronous ones, up to which product of learning rate and age
none did, and which guards win it back. Pure.

A cell *lost* if its mean difference from synchronous training, over seeds and at equal samples, is below -MATTERS and
below minus two standard errors. Both numbers were chosen before the runs of guess and sums. It also lost if every seed
by itself is below both, with the error over its problems: seeds that lose .16 and .90 have a large error.

Of three seeds, two standard errors are a weak test: Student's t of two degrees of freedom is below -2 in 9 % of equal
arms, and within it a loss can hide. So "did not lose" is no proof of equality, nor "lost" of a loss:
Difference.interval, 4.3 errors to each side, says what may be there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.old_tokens.cells import Row
from benchmarks.old_tokens.table import FASTER, at_seconds, interval, quantile, select, with_interval

MATTERS: Final = 0.02
"""Held-out reward that a loss must exceed to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """
    mean, error  of held-out reward, arm minus control, of ``seeds`` pairs. One pair has the error over its problems
    freedom      degrees of freedom of the error; infinite over problems
    each_lost    whether every seed by itself lost, by the error over its problems
    """

    mean: float
    error: float
    seeds: int
    freedom: float
    each_lost: bool = False

    @property
    def lost(self) -> bool:
        return self.each_lost or _is_below(self.mean, self.error)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval by Student's t."""
        wide = quantile(self.freedom) * self.error
        return self.mean - wide, self.mean + wide

    def __str__(self) -> str:
        """
        >>> str(Difference(mean=-0.07, error=0.023, seeds=3, freedom=2))
        '-0.070 [-0.169, +0.029]'
        """
        return with_interval(self.mean, self.error, freedom=self.freedom)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A learning rate with tokens of one age and a guard, on one task, beside synchronous training at that rate.

    held_out  of each seed
    seconds   the same as ``samples`` at equal seconds, if an asynchronous run trains FASTER x the tokens
    default   from the default correction at the same age; None without such runs
    """

    task: str
    rate: float
    staleness: int
    guard: str
    samples: Difference
    seconds: Difference
    held_out: tuple[float, ...] = ()
    default: Difference | None = None

    @property
    def product(self) -> float:
        return self.rate * self.staleness


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Return all cells with old tokens or a guard that have a synchronous run of the same seed beside them."""
    found = []
    for task, rate, age, guard in sorted({(r["task"], r["rate"], r["staleness"], r["guard"]) for r in rows}):
        arm = select(rows, task=task, rate=rate, staleness=age, guard=guard)
        control = select(rows, task=task, rate=rate, staleness=0, guard="tis")
        samples = between(arm, control)
        seconds = between(arm, control, of_control=lambda row: at_seconds(row, faster=FASTER))
        if (age or guard != "tis") and samples and seconds:
            found.append(
                Cell(
                    task=task,
                    rate=rate,
                    staleness=age,
                    guard=guard,
                    samples=samples,
                    seconds=seconds,
                    held_out=tuple(row["held_out"] for row in arm),
                    default=between(arm, select(rows, task=task, rate=rate, staleness=age, guard="tis")),
                )
            )
    return found


def between(
    arm: Sequence[Row],
    control: Sequence[Row],
    *,
    of_control: Callable[[Row], float] = lambda row: float(row["held_out"]),
) -> Difference | None:
    """Return arm - control, both of one task, over the seeds that both have; None if there is none."""
    others = {row["seed"]: row for row in control}
    pairs = [(row, others[row["seed"]]) for row in arm if row["seed"] in others]
    if not pairs:
        return None
    values = [row["held_out"] - of_control(other) for row, other in pairs]
    # both have the same problems, so this is at least the error of their difference
    errors = [math.hypot(row["held_out_error"], other["held_out_error"]) for row, other in pairs]
    mean, error = interval(values) if len(pairs) > 1 else (values[0], errors[0])
    return Difference(
        mean=mean,
        error=error,
        seeds=len(pairs),
        freedom=len(pairs) - 1 or math.inf,
        each_lost=all(map(_is_below, values, errors)),
    )


def _is_below(mean: float, error: float) -> bool:
    return mean < -MATTERS and mean < -2 * error


def mean_of(differences: Sequence[Difference]) -> Difference:
    """Return the mean of several tasks' differences, each task with equal weight: of these tasks, not of all that there
    may be. Its degrees of freedom are Welch and Satterthwaite's (1946), since tasks differ in their errors.
    """
    parts = sum(one.error**4 / one.freedom for one in differences)
    return Difference(
        mean=statistics.fmean(one.mean for one in differences),
        error=math.hypot(*(one.error for one in differences)) / len(differences),
        seeds=min(one.seeds for one in differences),
        freedom=sum(one.error**2 for one in differences) ** 2 / parts if parts else math.inf,
    )


def in_training(rows: Sequence[Row], cell: Cell) -> Difference | None:
    """Return the difference from synchronous training in the mean reward of the last quarter's training answers, with
    the synchronous run's as many versions earlier by its slope, since older weights sampled the others. None with fewer
    than two seeds, or if rows lack it.
    """
    of = [row for row in select(rows, task=cell.task, rate=cell.rate) if "reward/mean" in row.get("metrics", {})]
    control = {row["seed"]: row for row in select(of, staleness=0, guard="tis")}
    values = [
        _last_quarter(row) - _last_quarter(control[row["seed"]], earlier=cell.staleness)
        for row in select(of, staleness=cell.staleness, guard=cell.guard)
        if row["seed"] in control
    ]
    if len(values) < 2:
        return None
    mean, error = interval(values)
    return Difference(mean=mean, error=error, seeds=len(values), freedom=len(values) - 1)


def _last_quarter(row: Row, *, earlier: int = 0) -> float:
    """
    >>> _last_quarter({"steps": 40, "metrics": {"reward/mean": [0.0, 0.2, 0.4, 0.5]}}, earlier=4)
    0.46
    """
    *_, before, last = row["metrics"]["reward/mean"]
    return float(last - earlier * (last - before) / (row["steps"] / 4))


def orders(found: Sequence[Cell], by: Callable[[Cell], float]) -> float:
    """Return the share of pairs, of a cell that lost and one that did not, in which the former has the larger value;
    equal ones count half. nan without pairs."""
    lost, others = ([f"{by(cell):.3g}" for cell in found if cell.samples.lost is which] for which in (True, False))
    pairs = [(float(one), float(other)) for one in lost for other in others]
    return statistics.fmean((one > other) + (one == other) / 2 for one, other in pairs) if pairs else math.nan


def safe_product(found: Sequence[Cell]) -> float:
    """Return the largest product of learning rate and age up to which no cell without a guard lost; 0 if there is
    none.

    >>> fine, lost = (Difference(mean=mean, error=0.01, seeds=3, freedom=2) for mean in (-0.01, -0.05))
    >>> of = lambda age, what: Cell(task="a", rate=1e-5, staleness=age, guard="tis", samples=what, seconds=what)
    >>> f"{safe_product([of(1, fine), of(2, fine), of(4, lost), of(8, fine)]):.0e}"
    '2e-05'
    """
    plain = [cell for cell in found if cell.guard == "tis"]
    least = min((cell.product for cell in plain if cell.samples.lost), default=math.inf)
    return max((cell.product for cell in plain if cell.product < least * (1 - 1e-9)), default=0.0)
