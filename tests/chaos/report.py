"""Reports of storms: rows of JSON, one object per line, and a table over all storms.

    {"storm": 5000, "kill": "learner, any time", "victims": ["learner"], "seconds": 6.1, "step": 31}   after each kill
    {"storm": 5000, "seconds": 412.0, "problem": "", "tokens": {...}, "audit": {...}}                  after each storm
    {"kills": 1000, "asked": 1000, "storms": 20, "clean": true, ...}, {"killed": ..., "p50": ...}      over all storms

Rows are written as they occur, so an interrupted file is complete up to that point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.chaos.victims import FAULTS
from tests.harness.audits import audited

Row = Mapping[str, Any]

SLACK_SECONDS: Final = 5.0
"""How much longer than its load time a killed learner may take until it trains again."""

SUMMED: Final = (
    *("prompts", "published", "trained", "dropped", "failed", "filtered", "pending"),
    *("lost", "duplicated", "staleness_violations", "incarnations", "retrained", "steps"),
)
"""Keys of the audits that the report sums."""


def audit(run_directory: Path, *, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the output of `asyncrl audit --json` and its exit code."""
    found = audited(run_directory, token=environment.get("ASYNCRL_BUS_TOKEN", ""))
    return {"exit_code" if name == "code" else name: value for name, value in found.items()}


def append(path: Path | None, row: Row) -> None:
    """Append one line in one write, because concurrent storms share the file."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the file's complete lines."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that at least ``share`` of all values are at or below it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row per kind of kill: count and recovery times."""
    found = []
    for kind in dict.fromkeys(str(kind) for kinds in FAULTS.values() for kind in kinds):
        seconds = [row["seconds"] for row in rows if row.get("kill") == kind]
        if seconds:
            p50, p95 = quantile(seconds, 0.5), quantile(seconds, 0.95)
            row = {"killed": kind, "kills": len(seconds), "p50": p50, "p95": p95, "worst": max(seconds)}
            named = [row["named_seconds"] for row in rows if row.get("kill") == kind and "named_seconds" in row]
            found.append(row | ({"named": len(named), "named_worst": max(named)} if named else {}))
    return found


def learners(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how soon the learner trained again compared with its load time, and the engines' idle time in between."""
    kills = [row for row in rows if "load_seconds" in row]
    over = [row["seconds"] - row["load_seconds"] for row in kills]
    worker_seconds, idle = (sum(row.get(name, 0.0) for row in rows) for name in ("worker_seconds", "idle_seconds"))
    found: dict[str, Any] = {"learner_kills": len(kills)}
    if kills:
        loads = [row["load_seconds"] for row in kills]
        found |= {"load_p50": quantile(loads, 0.5), "load_p95": quantile(loads, 0.95)}
        found |= {"over_load_p50": quantile(over, 0.5), "over_load_p95": quantile(over, 0.95)}
        found |= {"over_load_worst": max(over), "over_load_by_5_s": sum(seconds > SLACK_SECONDS for seconds in over)}
    idle_share = idle / worker_seconds if worker_seconds else 0.0
    return found | {"worker_seconds": round(worker_seconds, 1), "idle_share": round(idle_share, 4)}


def total(rows: Sequence[Row], *, asked: int, storms: int) -> dict[str, Any]:
    """Return the sum of all storms. It is clean if every storm ended with a clean audit."""
    ends = [row for row in rows if "audit" in row]
    audits = [row["audit"] for row in ends if row["audit"]]
    generated, lost = (sum(row["tokens"].get(name, 0) for row in ends) for name in ("generated", "lost"))
    return {
        "kills": sum("kill" in row for row in rows),
        "asked": asked,
        "storms": storms,
        "clean": len(ends) == storms and all(is_clean(row) for row in ends),
        "problems": [row["problem"] for row in ends if row["problem"]],
        "tokens_generated": generated,
        "tokens_lost": lost,
        "tokens_lost_share": round(lost / generated, 5) if generated else 0.0,
        **learners(rows),
        "audit": {name: sum(audit[name] for audit in audits) for name in SUMMED}
        | {"max_staleness": max((audit["max_staleness"] for audit in audits), default=0)},
    }


def is_clean(row: Row) -> bool:
    """Return whether a storm's last row says that every process came back and no group was lost, duplicated or too
    stale."""
    return not row["problem"] and row["audit"].get("exit_code") == 0


def show(rows: Sequence[Row], summary: Row) -> str:
    """Return the report as text."""
    lines = [f"{'struck':42s} {'times':>6s} {'p50 s':>7s} {'p95 s':>7s} {'worst s':>8s} {'named':>6s} {'worst s':>8s}"]
    lines += [
        f"{row['killed']:42s} {row['kills']:6d} {row['p50']:7.1f} {row['p95']:7.1f} {row['worst']:8.1f} "
        + (f"{row['named']:6d} {row['named_worst']:8.1f}" if "named" in row else f"{'-':>6s} {'-':>8s}")
        for row in table(rows)
    ]
    audit = summary["audit"]
    lines += [
        f"{summary['kills']} kills of {summary['asked']} in {summary['storms']} storms, "
        f"{audit['incarnations']} incarnations, {audit['prompts']} prompt groups, {audit['trained']} trained",
        f"tokens: {summary['tokens_generated']} generated, {summary['tokens_lost']} of them lost "
        f"({summary['tokens_lost_share']:.2%})",
        f"learner: trained again {summary['over_load_p50']:.1f} s (p50), {summary['over_load_p95']:.1f} s (p95), "
        f"{summary['over_load_worst']:.1f} s (worst) after the kill and its load of {summary['load_p50']:.1f} s (p50); "
        f"over {SLACK_SECONDS:.0f} s: {summary['over_load_by_5_s']} of {summary['learner_kills']}"
        if summary["learner_kills"]
        else "learner: not killed",
        f"engines idle without it while prompts waited: {summary['idle_share']:.2%} of "
        f"{summary['worker_seconds']:.0f} worker seconds",
        f"lost {audit['lost']}, duplicated {audit['duplicated']}, violations {audit['staleness_violations']}",
        *summary["problems"],
        "clean" if summary["clean"] else "NOT CLEAN",
    ]
    return "\n".join(lines)
