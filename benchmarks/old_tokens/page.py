"""Renew the real model's picture, tables and conclusions on its page and on "Is my run healthy?", from the rows.

    cat rows.jsonl >> docs/results/gpu/old_tokens.jsonl && python -m benchmarks.old_tokens.page

Of runs with the most frequent number of steps; a cell that was run twice counts once, as it came last. verdict.py says
when a cell lost. Everything between two marks is made here. By hand are only numbers of these rows before the first
mark and behind the last one, those of staleness_bound.py, which tests hold to the rows, and those of README.md,
docs/guides/algorithms.md, docs/start/small_model.md and metrics.drift_alarm.
Differences have 95 % intervals in brackets, rewards their standard error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.metrics import MetricsSection
from asyncrl.config.staleness_bound import LARGEST_SHOWN
from benchmarks.gpu.rows import read
from benchmarks.old_tokens import alarm, seconds
from benchmarks.old_tokens.cells import Row, distinct
from benchmarks.old_tokens.table import FASTER, interval, print_rates, select
from benchmarks.old_tokens.verdict import (
    MATTERS,
    Cell,
    Difference,
    cells,
    in_training,
    mean_of,
    orders,
    safe_product,
)

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results"
ROWS: Final = RESULTS / "gpu" / "old_tokens.jsonl"
PICTURE: Final = RESULTS / "gpu" / "old_tokens.png"
PAGE: Final = RESULTS / "old_tokens.md"
HEALTHY: Final = RESULTS.parent / "start" / "healthy.md"
BEGIN, END = "<!-- made by python -m benchmarks.old_tokens.page: {} -->", "<!-- to here -->"
AGES: Final = (1, 2, 4, 8)
"""Ages of the whole table."""


def complete(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each cell, of the runs that can be compared."""
    if not rows:
        return []
    ((steps, _),) = Counter(row["steps"] for row in rows).most_common(1)
    return distinct(select(rows, steps=steps))


def losing(rows: Sequence[Row]) -> str:
    """Return one line of Markdown for each task without a guard, and for each guard: the cells that lost, the worst
    first."""
    found = cells(rows)
    lines = []
    for task in _tasks(rows):
        of = [cell for cell in found if (cell.task, cell.guard) == (task, "tis")]
        lines.append(f"- *{task}*: {_lost_of(of, _of)}.")
    for guard in _guards_of(found):
        of = [cell for cell in found if cell.guard == guard]
        beside = [cell.default.mean for cell in of if cell.staleness and cell.default]
        better = sum(mean > 0 for mean in beside)
        lines.append(
            f"- With the guard `{guard}`: {_lost_of(of, _on)}. It ended above TIS with tokens as old in {better} of "
            f"{len(beside)} cells."
        )
    lost = [cell for cell in found if cell.samples.lost]
    if unsure := sum(cell.samples.interval[1] >= 0 for cell in lost):
        lines.append(
            f"- **{unsure} of these {len(lost)} losses are not shown by their 95 % interval**, which reaches to 0 or "
            "above."
        )
    if not_run := _not_run(rows):
        lines.append(f"- **Not run**: {'; '.join(not_run)}.")
    return "\n".join(lines) or "There are no rows yet."


def _not_run(rows: Sequence[Row]) -> list[str]:
    """Return what was not run without a guard, and what of the rest was not run with each guard."""
    rates, tasks = sorted({row["rate"] for row in rows}), _tasks(rows)
    grid = {(rate, age): list(tasks) for age in AGES for rate in rates}
    said = []
    for guard in ("tis", *sorted({row["guard"] for row in rows} - {"tis"})):
        there = {(row["task"], row["rate"], row["staleness"]) for row in select(rows, guard=guard)}
        lacks = {at: [task for task in of if (task, *at) not in there] for at, of in grid.items()}
        texts = [
            f"{rate:g} × {age}" + (f" on {' and '.join(lacks[rate, age])}" if lacks[rate, age] != of else "")
            for (rate, age), of in grid.items()
            if lacks[rate, age]
        ]
        if guard == "tis":
            grid = {at: [task for task in of if task not in lacks[at]] for at, of in grid.items()}
        if texts:
            said.append(f"{'without a guard' if guard == 'tis' else f'with `{guard}`'} {', '.join(texts)}")
    return said


def _lost_of(of: Sequence[Cell], name: Callable[[Cell], str]) -> str:
    lost = sorted((cell for cell in of if cell.samples.lost), key=lambda cell: cell.samples.mean)
    said = ", ".join(f"{name(cell)} {_counted(cell.samples, most=3)}" for cell in lost)
    fresh = sum(not cell.staleness for cell in of)
    cells_said = f"{len(of)} cells" + (f" ({fresh} with fresh tokens)" if fresh else "")
    return f"{len(lost)} of {cells_said} lost{': ' if lost else ''}{said}"


def tables(rows: Sequence[Row]) -> str:
    """Return picture and tables in Markdown: differences from synchronous training, rewards, guards."""
    if not rows:
        return "There are no rows yet."
    counts = ", ".join(f"{len(select(rows, task=task))} of {task}" for task in _tasks(rows))
    picture = f"![held-out reward of SmolLM2-135M against learning rate]({PICTURE.relative_to(RESULTS)})"
    found = cells(rows)
    parts = [
        f"{len(rows)} runs of {rows[0]['steps']} steps ({counts}).\n\n{picture}",
        "Difference from synchronous training at the same rate, **at equal samples** (bold: lost; in brackets the 95 % "
        "interval by Student's t over seeds, or over problems of one seed):\n\n"
        + _differences(found, _tasks(rows), of=lambda cell: cell.samples),
        f"**At equal seconds**, if an asynchronous run trains {FASTER} x the tokens:\n\n"
        + _differences(found, _tasks(rows), of=lambda cell: cell.seconds),
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for task in _tasks(rows):
            print_rates(select(rows, task=task, guard="tis"), f"{task}: held-out reward")
    return "\n\n".join([*parts, said.getvalue().strip(), *_guards(found, _tasks(rows))])


def follows(rows: Sequence[Row]) -> str:
    """Return what the rows say of the default bound and of the alarm, in Markdown."""
    found = cells(rows)
    lines = [*_of_bound(rows, found), *_of_alarm(rows)]
    return "\n".join(lines) or "There are no rows yet."


# -- tables ------------------------------------------------------------------------------------------------------------


def _differences(found: Sequence[Cell], tasks: Sequence[str], *, of: Callable[[Cell], Difference]) -> str:
    plain = [cell for cell in found if cell.guard == "tis"]
    most = max((cell.samples.seeds for cell in plain), default=0)
    lines = [f"| rate | staleness | product | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 4) + "|"]
    for rate, age in sorted({(cell.rate, cell.staleness) for cell in plain}):
        at = {cell.task: of(cell) for cell in plain if (cell.rate, cell.staleness) == (rate, age)}
        texts = [_counted(at[task], most=most) if task in at else "" for task in tasks]
        mean = _marked(mean_of(list(at.values()))) if len(at) == len(tasks) > 1 else ""
        lines.append(f"| {rate:g} | {age} | {rate * age:.2g} | {' | '.join(texts)} | {mean} |")
    return "\n".join(lines)


def _guards(found: Sequence[Cell], tasks: Sequence[str]) -> list[str]:
    """Return a table of all cells with a guard, those that lost first, and one of their means over tasks."""
    guarded = [cell for cell in found if cell.guard != "tis"]
    if not guarded:
        return []
    lines = [
        "**Guards**: difference from synchronous training with TIS at that rate, and from TIS with tokens as old; what "
        "lost first, the worst first. ±: standard error.\n",
        "| rate × age | guard | task | seeds | held-out | from synchronous | from TIS | at equal seconds |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {_of(cell)} | {cell.guard} | {cell.task} | {cell.samples.seeds} | {_reward(cell.held_out)} | "
        f"{_marked(cell.samples)} | {cell.default if cell.staleness and cell.default else ''} | "
        f"{_marked(cell.seconds) if cell.staleness else ''} |"
        for cell in sorted(guarded, key=lambda cell: (not cell.samples.lost, cell.samples.mean))
    ]
    means = [
        "The means over the tasks that each was run on, TIS beside it on the same:\n",
        "| rate × age | tasks | guard | from synchronous | from TIS | at equal seconds |",
        "|---" * 6 + "|",
    ]
    for rate, age in _pairs(guarded):
        at = [cell for cell in found if (cell.rate, cell.staleness) == (rate, age)]
        for on, guards in _by_tasks(at, tasks).items():
            for guard in (*(["tis"] if age else []), *guards):
                of = [cell for cell in at if cell.guard == guard and cell.task in on]
                others = [cell.default for cell in of if cell.default] if age and guard != "tis" else []
                means.append(
                    f"| {rate:g} × {age} | {', '.join(on)} | {guard} | {_mean(cell.samples for cell in of)} | "
                    f"{_mean(others)} | {_mean(cell.seconds for cell in of) if age else ''} |"
                )
    return ["\n".join(lines), "\n".join(means)]


def _by_tasks(at: Sequence[Cell], tasks: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Return guards by the tasks that they were run on: means over other tasks cannot be compared."""
    made: dict[tuple[str, ...], list[str]] = {}
    for guard in _guards_of(at):
        on = {cell.task for cell in at if cell.guard == guard}
        made.setdefault(tuple(task for task in tasks if task in on), []).append(guard)
    return made


def _mean(differences: Iterable[Difference]) -> str:
    found = list(differences)
    return _marked(mean_of(found)) if found else ""


def _reward(held_out: Sequence[float]) -> str:
    mean, error = interval(held_out)
    return f"{mean:.3f} ± {error:.3f}" if len(held_out) > 1 else f"{mean:.3f}"


# -- words -------------------------------------------------------------------------------------------------------------


def _of_bound(rows: Sequence[Row], found: Sequence[Cell]) -> list[str]:
    plain = [cell for cell in found if cell.guard == "tis"]
    if not plain:
        return []
    safe = safe_product(plain)
    within = [cell for cell in plain if cell.product <= safe * (1 + 1e-9)]
    lost = sorted((cell for cell in plain if cell.samples.lost), key=lambda cell: cell.product)
    worst = min(within, key=lambda cell: cell.samples.mean, default=None)
    said = f"**Nothing lost up to learning rate × age = {safe:.2g}**: "
    ran = ", ".join(dict.fromkeys(_of(cell) for cell in sorted(within, key=lambda cell: (cell.rate, cell.staleness))))
    said += f"none of the {len(within)} cells up to it ({ran}) by over {MATTERS:g} and two standard errors"
    if worst:
        said += f" (worst: {_of(worst)} on *{worst.task}*, {worst.samples}; the intervals leave room for "
        said += f"{min(cell.samples.interval[0] for cell in within):+.3f})"
    if lost:
        first = [cell for cell in lost if cell.product <= lost[0].product * (1 + 1e-9)]
        said += f"; the least product that lost is {lost[0].product:.2g} ("
        said += ", ".join(f"{_of(cell)} on *{cell.task}* {_counted(cell.samples, most=3)}" for cell in first) + ")"
    if safe * (1 + 1e-9) >= LARGEST_SHOWN:
        what = f"The default's {LARGEST_SHOWN:g}, over which `asyncrl check` speaks, is not over it."
    else:
        what = f"The default's {LARGEST_SHOWN:g} is **over it**."
    lines = [f"- {said}. {what}"]
    if 0 < len(lost) < len(plain):
        lines.append(_of_product(rows, plain))
    return lines


def _of_product(rows: Sequence[Row], plain: Sequence[Cell]) -> str:
    """Return how many cells lost at each product, held out and in training, and how well it orders them."""
    of: dict[str, list[Cell]] = {}
    for cell in sorted(plain, key=lambda cell: cell.product):
        of.setdefault(f"{cell.product:.2g}", []).append(cell)
    counts = [f"{sum(cell.samples.lost for cell in its)} of {len(its)} at {product}" for product, its in of.items()]
    said = f"- **Cells that lost, by product**: {', '.join(counts)}. "
    training = {product: [one for cell in its if (one := in_training(rows, cell))] for product, its in of.items()}
    if all(training.values()):
        counts = [f"{sum(one.lost for one in its)} of {len(its)}" for its in training.values()]
        said += (
            "The held-out reward is of the last step alone; by that of all training answers of the last quarter, with "
            f"the synchronous run's as many versions earlier (not chosen before the rows): {', '.join(counts)}. "
        )
    shares = [orders(plain, by) for by in (lambda c: c.product, lambda c: c.rate, lambda c: c.staleness)]
    return said + (
        f"Of two cells, one that lost and one that did not, the former has the larger product in {shares[0]:.0%} "
        f"(equal ones count half), the larger rate in {shares[1]:.0%}, the older tokens in {shares[2]:.0%}."
    )


def _of_alarm(rows: Sequence[Row]) -> list[str]:
    threshold = MetricsSection().drift_alarm
    lost, others = alarm.split(alarm.of_table([row for row in rows if "metrics" in row]))
    old = [run for run in others if not run.is_synchronous]
    fresh = [run for run in others if run.is_synchronous]
    if not lost or not old:
        return []
    steps = sorted(at for run in lost if (at := run.rang_at(threshold)))
    missed = Counter(f"{run.arm} on *{run.among.split()[0]}*" for run in lost if not run.rang_at(threshold))
    false = Counter(run.arm for run in old if run.rang_at(threshold))
    said = f"{len(steps)} of the {len(lost)} runs that end over 0.03 below the synchronous one of their seed"
    said += f" (at step {statistics.median(steps):g}, median)" if steps else ""
    said += f"; it misses {_each(missed)}" if missed else ""
    said += f". **It also rings in {false.total()} of the {len(old)} others with old tokens**"
    said += f" ({_each(false)})" if false else ""
    said += f", and in {sum(run.rang_at(threshold) > 0 for run in fresh)} of {len(fresh)} synchronous runs"
    guards = _of_alarm_with_guards(rows, threshold)
    return [f"- **The alarm** over {threshold:g}, which these runs did not choose, rings in {said}.{guards}"]


def _of_alarm_with_guards(rows: Sequence[Row], threshold: float) -> str:
    """Return a sentence for each guard: how often the alarm rings, and how many of these runs lost."""
    said = ""
    for guard in sorted({row["guard"] for row in rows} - {"tis"}):
        (rang, lost), (rang_too, others) = _rang(rows, guard, threshold)
        said += f" With `{guard}` it rings in {rang} of {lost} runs that lost, and in {rang_too} of the {others} "
        said += "others with old tokens."
    return said


def _rang(rows: Sequence[Row], guard: str, threshold: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return in how many runs with old tokens the alarm rings, and how many there are: that lost, and others."""
    known = [row for row in rows if "metrics" in row]
    old = [row for row in select(known, guard=guard) if row["staleness"]]
    lost, others = alarm.split([alarm.of_row(row) for row in (*select(known, staleness=0, guard="tis"), *old)])
    others = [run for run in others if not run.is_synchronous]
    one, other = ((sum(run.rang_at(threshold) > 0 for run in of), len(of)) for of in (lost, others))
    return one, other


Tenths = tuple[int, NDArray[np.float64]]
"""Number of runs, and the tenths .1, .5 and .9 over them of drift, |log ratio| and ESS of sequences: f64[3, 3]"""


def _metrics(rows: Sequence[Row], lost: Sequence[alarm.Recorded]) -> tuple[Tenths, Tenths] | None:
    """Return what the metrics were in runs with old tokens that did not lose, and in those that did."""
    ended = {(run.among, run.arm) for run in lost}
    of: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    known = {(row["task"], row["rate"], row["seed"]) for row in select(rows, guard="tis", staleness=0)}
    for row in select(rows, guard="tis"):
        if row["staleness"] and (row["task"], row["rate"], row["seed"]) in known:
            (run,) = alarm.of_table([row])
            later = {name: row["metrics"][name][1:] for name in ("mismatch/mean", "offpolicy/sequence_ess")}
            found = (run.largest, max(later["mismatch/mean"]), min(later["offpolicy/sequence_ess"]))
            of[(run.among, run.arm) in ended].append(found)
    if not all(of.values()):
        return None
    others, losers = ((len(runs), np.quantile(runs, [0.1, 0.5, 0.9], axis=0).T) for runs in of.values())
    return others, losers


def healthy(rows: Sequence[Row]) -> str:
    """Return what "Is my run healthy?" says of metrics of old tokens, in Markdown."""
    threshold = MetricsSection().drift_alarm
    found = _metrics(rows, alarm.split(alarm.of_table([row for row in rows if "metrics" in row]))[0]) if rows else None
    if found is None:
        return "There are too few rows yet."
    (fine, (drift, moved, ess)), (lost, (lost_drift, lost_moved, lost_ess)) = found
    ages = sorted({row["staleness"] for row in select(rows, guard="tis")} - {0})
    (rang, _), (rang_too, _) = _rang(rows, "tis", threshold)
    (with_topr, of), (with_topr_too, of_others) = _rang(rows, "topr", threshold)
    largest = max(row["rate"] for row in rows)
    of_lost = f"{rang} of those that lost, and in {rang_too} of the others"
    of_topr = f"{with_topr} of {of} runs that lost and in {with_topr_too} of {of_others} that did not"
    return (
        f"How old tokens fare, by metric: medians, and in brackets nine of ten, of {fine + lost} runs of [SmolLM2-135M]"
        f"(../results/old_tokens.md#a-real-model) at rates up to {largest:g} whose tokens were "
        f"all {', '.join(map(str, ages[:-1]))} or {ages[-1]} versions old. They overlap, so no single one decides: the "
        f"alarm's limit of {threshold:g} is exceeded in {of_lost}. With `topr` drift says less: it exceeded the limit "
        f"in {of_topr}.\n\n"
        f"| metric | {fine} runs that ended within 0.03 of synchronous ones, or above | {lost} that lost more |\n"
        "|---|---|---|\n"
        f"| `offpolicy/drift`, largest that lasted five steps | {drift[1]:.2g} (under {drift[2]:.2g}) | "
        f"{lost_drift[1]:.2g} (over {lost_drift[0]:.2g}): lower the learning rate or `staleness.max_staleness`, or "
        "take `topr` |\n"
        "| `offpolicy/staleness_<age>/mismatch`, largest quarter of the run; age 0 is numerics, what an older bucket "
        f"has more is the policy's move since | {moved[1]:.2g} nats (under {moved[2]:.2g}) | {lost_moved[1]:.2g} (over "
        f"{lost_moved[0]:.2g}) |\n"
        "| `offpolicy/sequence_ess`, the lowest quarter (of tokens, by age: `offpolicy/staleness_<age>/ess`, not "
        f"recorded in these runs) | {ess[1]:.2g} of the sequences (over {ess[0]:.2g}) | {lost_ess[1]:.2g} (under "
        f"{lost_ess[2]:.2g}): few answers carry the step |"
    )


def _each(counts: Counter[str]) -> str:
    """
    >>> _each(Counter(["a", "a", "b"]))
    '2 of a, 1 of b'
    """
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def _guards_of(found: Iterable[Cell]) -> list[str]:
    return sorted({cell.guard for cell in found} - {"tis"})


def _pairs(found: Iterable[Cell]) -> list[tuple[float, int]]:
    """Return rates and ages, the largest product first."""
    return sorted({(cell.rate, cell.staleness) for cell in found}, key=lambda pair: (-pair[0] * pair[1], pair))


def _of(cell: Cell) -> str:
    return f"{cell.rate:g} × {cell.staleness}"


def _on(cell: Cell) -> str:
    return f"{_of(cell)} on *{cell.task}*"


def _marked(difference: Difference) -> str:
    return f"**{difference}**" if difference.lost else str(difference)


def _counted(difference: Difference, *, most: int) -> str:
    """Return the difference, and of how many seeds if they are fewer than ``most``."""
    seeds = f" ({difference.seeds} seed{'s' if difference.seeds > 1 else ''})" if difference.seeds < most else ""
    return _marked(difference) + seeds


# -- the page ----------------------------------------------------------------------------------------------------------


def replaced(page: str, name: str, made: str) -> str:
    """Return the page with ``made`` between the marks of ``name``. Raises ValueError if it has none."""
    begin = BEGIN.format(name)
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page lacks {begin} ... {END}")
    return f"{before}{begin}\n{made}\n{END}{after}"


def renewed(page: str, rows: Sequence[Row]) -> str:
    """Return the page with everything that is made of the rows."""
    for name, make in (("losing", losing), ("tables", tables), ("follows", follows)):
        page = replaced(page, name, make(rows))
    return replaced(page, "seconds", seconds.of_files())


def main() -> int:
    from benchmarks.old_tokens.plot import draw

    logging.disable()  # the alarm's own lines
    rows = complete(read(ROWS))
    if rows:
        draw([row for row in rows if row["guard"] == "tis"], PICTURE)
    PAGE.write_text(renewed(PAGE.read_text(), rows))
    HEALTHY.write_text(replaced(HEALTHY.read_text(), "healthy", healthy(rows)))
    print(f"{PAGE}: {len(rows)} runs; safe up to {safe_product(cells(rows)):.2g}, the default's is {LARGEST_SHOWN:g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
