"""Renew the real model's picture, tables and conclusions on the page, from the rows that are there.

    cat rows.jsonl >> docs/results/gpu/old_tokens.jsonl && python -m benchmarks.old_tokens.page

Of runs with the most frequent number of steps; a cell that was run twice counts once, as it came last. verdict.py says
when a cell lost. Everything between two marks on the page is made here, so no number of these rows is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from asyncrl.config.metrics import MetricsSection
from asyncrl.config.staleness_bound import LARGEST_SHOWN
from benchmarks.old_tokens import alarm
from benchmarks.old_tokens import cells as runs
from benchmarks.old_tokens.__main__ import read
from benchmarks.old_tokens.cells import Row
from benchmarks.old_tokens.table import FASTER, interval, print_rates, select
from benchmarks.old_tokens.verdict import MATTERS, Cell, Difference, between, cells, mean_of, safe_product

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results"
ROWS: Final = RESULTS / "gpu" / "old_tokens.jsonl"
PICTURE: Final = RESULTS / "gpu" / "old_tokens.png"
PAGE: Final = RESULTS / "old_tokens.md"
BEGIN, END = "<!-- made by python -m benchmarks.old_tokens.page: {} -->", "<!-- to here -->"


def complete(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each cell, of the runs that can be compared."""
    if not rows:
        return []
    ((steps, _),) = Counter(row["steps"] for row in rows).most_common(1)
    return list({runs.Cell.of(row): row for row in select(rows, steps=steps)}.values())


def losing(rows: Sequence[Row]) -> str:
    """Return one line of Markdown for each cell without a guard that lost, the worst of each task first."""
    plain = [cell for cell in cells(rows) if cell.guard == "tis"]
    lines = []
    for task in _tasks(rows):
        lost = sorted((one for one in plain if one.task == task and one.samples.lost), key=lambda one: one.samples.mean)
        said = ", ".join(f"{_of(one)} {_counted(one.samples, most=3)}" for one in lost)
        measured = sum(one.task == task for one in plain)
        lines.append(f"- *{task}*: {len(lost)} of {measured} cells lost{': ' if lost else ''}{said}.")
    return "\n".join(lines) or "There are no rows yet."


def tables(rows: Sequence[Row]) -> str:
    """Return picture and tables in Markdown: differences from synchronous training, rewards, guards."""
    if not rows:
        return "There are no rows yet."
    counts = ", ".join(f"{len(select(rows, task=task))} of {task}" for task in _tasks(rows))
    picture = f"![held-out reward of SmolLM2-135M against learning rate]({PICTURE.relative_to(RESULTS)})"
    found = cells(rows)
    parts = [
        f"{len(rows)} runs of {rows[0]['steps']} steps ({counts}).\n\n{picture}",
        "Difference from synchronous training at the same rate, **at equal samples** (bold: lost):\n\n"
        + _differences(found, _tasks(rows), of=lambda cell: cell.samples),
        f"**At equal seconds**, if an asynchronous run trains {FASTER} x the tokens:\n\n"
        + _differences(found, _tasks(rows), of=lambda cell: cell.seconds),
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for task in _tasks(rows):
            print_rates(select(rows, task=task, guard="tis"), f"{task}: held-out reward")
    return "\n\n".join([*parts, said.getvalue().strip(), *_guards(rows)])


def follows(rows: Sequence[Row]) -> str:
    """Return what the rows say of the default bound, correction and guards, in Markdown."""
    found = cells(rows)
    lines = [*_of_bound(found), *_of_guards(found, _tasks(rows)), *_of_alarm(rows)]
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


def _guards(rows: Sequence[Row]) -> list[str]:
    """Return a table for each rate and age with guards: rewards, and the mean differences over its tasks."""
    made = []
    guarded = [row for row in rows if row["guard"] != "tis"]
    for rate, age in sorted({(row["rate"], row["staleness"]) for row in guarded}):
        tasks = [task for task in _tasks(rows) if select(guarded, task=task, rate=rate, staleness=age)]
        there = select(rows, rate=rate, staleness=age)
        arms = {"synchronous": select(rows, rate=rate, staleness=0, guard="tis")}
        arms |= {name: select(there, guard=name) for name in sorted({row["guard"] for row in there})}
        controls = (arms["synchronous"], arms.get("tis", []))
        lines = [
            f"Guards at {rate:g} with tokens of {age} versions: held-out reward, and mean difference over the tasks\n",
            f"| | {' | '.join(tasks)} | from synchronous | from tis |",
            "|---" * (len(tasks) + 3) + "|",
        ]
        for name, arm in arms.items():
            rewards = [_reward(select(arm, task=task)) for task in tasks]
            against = [_over(arm, control, tasks) if arm is not control else "" for control in controls]
            lines.append(f"| {name} | {' | '.join(rewards)} | {' | '.join(against)} |")
        made.append("\n".join(lines))
    return made


def _over(arm: Sequence[Row], control: Sequence[Row], tasks: Sequence[str]) -> str:
    each = [between(select(arm, task=task), select(control, task=task)) for task in tasks]
    there = [one for one in each if one]
    return _marked(mean_of(there)) if len(there) == len(tasks) else ""


def _reward(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    mean, error = interval([row["held_out"] for row in rows])
    return f"{mean:.3f} ± {error:.3f}" if len(rows) > 1 else f"{mean:.3f}"


# -- words -------------------------------------------------------------------------------------------------------------


def _of_bound(found: Sequence[Cell]) -> list[str]:
    plain = [cell for cell in found if cell.guard == "tis"]
    if not plain:
        return []
    safe = safe_product(plain)
    within = [cell for cell in plain if cell.product <= safe * (1 + 1e-9)]
    lost = sorted((cell for cell in plain if cell.samples.lost), key=lambda cell: cell.product)
    worst = min(within, key=lambda cell: cell.samples.mean, default=None)
    said = f"**Nothing lost up to learning rate × age = {safe:.2g}**: "
    said += f"none of {len(within)} cells up to it by over {MATTERS:g} and two standard errors"
    if worst:
        said += f" (worst: {_of(worst)} on *{worst.task}*, {worst.samples}; two errors leave room for "
        said += f"{min(cell.samples.least for cell in within):+.3f})"
    if lost:
        first = [cell for cell in lost if cell.product <= lost[0].product * (1 + 1e-9)]
        said += f"; the least product that lost is {lost[0].product:.2g} ("
        said += ", ".join(f"{_of(cell)} on *{cell.task}* {_counted(cell.samples, most=3)}" for cell in first) + ")"
    if safe * (1 + 1e-9) >= LARGEST_SHOWN:
        what = f"The default's {LARGEST_SHOWN:g}, over which `asyncrl check` speaks, is not over it."
    else:
        what = f"The default's {LARGEST_SHOWN:g} is **over it**."
    lines = [f"- {said}. {what}"]
    if lost and (fine := [cell for cell in plain if cell.product > lost[0].product and not cell.samples.lost]):
        texts = ", ".join(f"{_of(cell)} on *{cell.task}* {cell.samples}" for cell in fine)
        lines.append(
            f"- **The product orders cells only roughly**: over {lost[0].product:.2g} these did not lose: {texts}."
        )
    return lines


def _of_guards(found: Sequence[Cell], tasks: Sequence[str]) -> list[str]:
    lines = []
    for rate, age in sorted({(cell.rate, cell.staleness) for cell in found if cell.guard != "tis"}):
        at = [cell for cell in found if (cell.rate, cell.staleness) == (rate, age)]
        plain = {cell.task: cell for cell in at if cell.guard == "tis"}
        for guard in sorted({cell.guard for cell in at} - {"tis"}):
            said = []
            for cell in (one for task in tasks for one in at if (one.task, one.guard) == (task, guard)):
                without = f", {plain[cell.task].samples.mean:+.3f} without" if cell.task in plain else ""
                said.append(f"*{cell.task}* {_counted(cell.samples, most=3)} from synchronous{without}")
            lost = [cell for cell in at if cell.guard == guard and cell.samples.lost]
            what = f"still loses on {', '.join(cell.task for cell in lost)}" if lost else "loses on no task tried"
            lines.append(f"- **Guard `{guard}`** at {rate:g} × {age} {what}: {'; '.join(said)}.")
    return lines


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
    return [
        f"- **The alarm** over {threshold:g}, which these runs did not choose, rings in {said}.",
        _of_metrics(rows, lost),
    ]


def _of_metrics(rows: Sequence[Row], lost: Sequence[alarm.Recorded]) -> str:
    """Return medians and tenths of what the metrics were in runs with old tokens that lost, and in others."""
    ended = {(run.among, run.arm) for run in lost}
    of: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    known = {(row["task"], row["rate"], row["seed"]) for row in select(rows, guard="tis", staleness=0)}
    for row in select(rows, guard="tis"):
        if row["staleness"] and (row["task"], row["rate"], row["seed"]) in known:
            (run,) = alarm.of_table([row])
            later = {name: row["metrics"][name][1:] for name in ("mismatch/mean", "offpolicy/sequence_ess")}
            found = (run.largest, max(later["mismatch/mean"]), min(later["offpolicy/sequence_ess"]))
            of[(run.among, run.arm) in ended].append(found)
    if not all(of.values()):
        return "- **Metrics**: too few runs."
    texts = []
    for is_lost, name in ((False, "the others with old tokens"), (True, "those that lost")):
        drift, moved, ess = np.quantile(of[is_lost], [0.1, 0.5, 0.9], axis=0).T
        texts.append(
            f"in {name} ({len(of[is_lost])}) drift {drift[1]:.2g} ({drift[0]:.2g} to {drift[2]:.2g}), "
            f"|log ratio| {moved[1]:.2g} ({moved[0]:.2g} to {moved[2]:.2g}), "
            f"ESS of sequences {ess[1]:.2g} ({ess[0]:.2g} to {ess[2]:.2g})"
        )
    return (
        "- **Metrics**, median and tenths over runs (drift: the largest that lasted five steps; the others: the worst "
        f"quarter of a run, without the first): {'; '.join(texts)}."
    )


def _each(counts: Counter[str]) -> str:
    """
    >>> _each(Counter(["a", "a", "b"]))
    '2 of a, 1 of b'
    """
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def _of(cell: Cell) -> str:
    return f"{cell.rate:g} × {cell.staleness}"


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
    return page


def main() -> int:
    from benchmarks.old_tokens.plot import draw

    logging.disable()  # the alarm's own lines
    rows = complete(read(ROWS))
    if rows:
        draw([row for row in rows if row["guard"] == "tis"], PICTURE)
    PAGE.write_text(renewed(PAGE.read_text(), rows))
    print(f"{PAGE}: {len(rows)} runs; safe up to {safe_product(cells(rows)):.2g}, the default's is {LARGEST_SHOWN:g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
