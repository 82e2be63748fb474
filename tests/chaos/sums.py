"""Sums the faults of the recorded storms by kind: the table of docs/results/reliability.md.

    python -m tests.chaos.sums [FILE ...]

Without files, reads those of docs/results. Plain kills share one row; every other kind has its own row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.chaos import report
from tests.chaos.victims import DISKS, KILLS, OTHERS, RANKS, RESOURCES

NAMED_SECONDS: Final = 10.0
GOAL: Final = 1000
OTHER_THAN_KILLS: Final = tuple(map(str, (*OTHERS, *RESOURCES, *DISKS)))
_KINDS: Final = {*map(str, (*KILLS, *RANKS)), *OTHER_THAN_KILLS}
_COUNTED: Final = ("lost", "duplicated", "staleness_violations")


def faults(rows: Iterable[report.Row]) -> list[report.Row]:
    """Return the rows of single faults, without the sums at the end of a file."""
    return [row for row in rows if row.get("kill") in _KINDS]


def line(name: str, rows: Sequence[report.Row]) -> str:
    seconds = [row["seconds"] for row in rows]
    named = [row["named_seconds"] for row in rows if "named_seconds" in row]
    late = sum(took > NAMED_SECONDS for took in named)
    worst = f"{max(named):.1f} s" if named else "-"
    p50 = f"{report.quantile(seconds, 0.5):.1f} s"
    return f"| {name} | {len(rows)} | {p50} | {max(seconds):.1f} s | {len(named)} | {worst} | {late or '-'} |"


def table(rows: Sequence[report.Row]) -> str:
    """Return the table in Markdown."""
    found = faults(rows)
    others = [row for row in found if row["kill"] in OTHER_THAN_KILLS]
    kills = [row for row in found if row["kill"] not in OTHER_THAN_KILLS]
    lines = [
        "| fault | times | until recovered, p50 | worst | named | named after, worst | after more than 10 s |",
        "|---|---|---|---|---|---|---|",
    ]
    by_kind = ((kind, [row for row in others if row["kill"] == kind]) for kind in OTHER_THAN_KILLS)
    lines += [line(kind, of_kind) for kind, of_kind in by_kind if of_kind]
    lines.append(line(f"**all of these** (goal: {GOAL:,})", others))
    if kills:
        lines.append(line("kills, one process or machine at a time", kills))
    return "\n".join(lines)


def audits(rows: Iterable[report.Row]) -> str:
    """Return one sentence on what the storms lost."""
    ends = [row for row in rows if "audit" in row and "storm" in row and row["audit"]]
    groups = sum(row["audit"]["prompts"] for row in ends)
    counts = ", ".join(f"{name} {sum(row['audit'][name] for row in ends)}" for name in _COUNTED)
    unclean = sum(not report.is_clean(row) for row in ends)
    return f"{len(ends)} storms, {groups:,} prompt groups: {counts}; {unclean} of the storms not clean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="rows of storms (default: docs/results/chaos*.jsonl)")
    files = parser.parse_args().files or sorted((ROOT / "docs" / "results").glob("chaos*.jsonl"))
    rows = [row for file in files for row in report.read(file)]
    print(table(rows))
    print()
    print(audits(rows))


if __name__ == "__main__":
    main()
