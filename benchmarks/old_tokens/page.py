"""Renew the real model's picture and tables on the page, from the rows that are there.

    cat rows.jsonl >> docs/results/gpu/old_tokens.jsonl && python -m benchmarks.old_tokens.page

Both are of runs with the most frequent number of steps, and of tasks of which a whole seed was run; a cell that was run
twice counts once, as it came last.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.old_tokens.__main__ import read
from benchmarks.old_tokens.cells import Cell, Row
from benchmarks.old_tokens.table import print_tables, select

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results"
ROWS: Final = RESULTS / "gpu" / "old_tokens.jsonl"
PICTURE: Final = RESULTS / "gpu" / "old_tokens.png"
PAGE: Final = RESULTS / "old_tokens.md"
BEGIN, END = "<!-- made by python -m benchmarks.old_tokens.page -->", "<!-- to here -->"


def complete(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each cell, of the runs that can be compared."""
    if not rows:
        return []
    ((steps, _),) = Counter(row["steps"] for row in rows).most_common(1)
    found = list({Cell.of(row): row for row in select(rows, steps=steps)}.values())
    of_seed = Counter((row["task"], row["seed"]) for row in select(found, guard="tis"))
    whole = {task for (task, _), count in of_seed.items() if count == max(of_seed.values())}
    return [row for row in found if row["task"] in whole]


def section(rows: Sequence[Row]) -> str:
    """Return picture and tables in Markdown."""
    if not rows:
        return "There are no rows yet."
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for task in tasks:  # by themselves: one may lack some seeds
            print_tables(select(rows, task=task))
    runs = ", ".join(f"{len(select(rows, task=task))} of {task}" for task in tasks)
    picture = f"![held-out reward of SmolLM2-135M against learning rate]({PICTURE.relative_to(RESULTS)})"
    return f"{len(rows)} runs of {rows[0]['steps']} steps ({runs}).\n\n{picture}\n\n{said.getvalue().strip()}"


def replaced(page: str, made: str) -> str:
    """Return the page with ``made`` between its marks. Raises ValueError if it has none."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page lacks {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> int:
    from benchmarks.old_tokens.plot import draw

    rows = complete(read(ROWS))
    if rows:
        draw([row for row in rows if row["guard"] == "tis"], PICTURE)
    PAGE.write_text(replaced(PAGE.read_text(), section(rows)))
    print(f"{PAGE}: {len(rows)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
