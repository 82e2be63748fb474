"""The three costs of a fleet, from the results of fleet.py: per trajectory, per waiting worker, and per weight load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header and rows."""
FLEET_RESULTS: Final = Path(__file__).parent.parent / "docs" / "results" / "fleet.jsonl"
_ENOUGH: Final = 100
"""Number of workers from which the cost per worker stands out from the other costs."""


def measured(results: Path) -> dict[str, float]:
    """Return the message rates from the results of fleet.py: presence and loads from the largest fleet, a group's
    messages from the smallest. Empty without a large fleet."""
    found = _fleets(results)
    if not found or found[-1]["workers"] < _ENOUGH:
        return {}
    first, last = found[0], found[-1]
    of_group = first["work"]["messages"] * first["group_size"]
    groups = last["trajectories_per_second"] / last["group_size"]
    loads = last["workers"] / last["step_seconds"]
    extra = last["load"]["messages"] - last["presence"]["messages"] - groups * of_group
    return {
        "presence_messages": round(last["presence"]["messages"] / last["workers"], 2),
        "group_messages": round(of_group, 1),
        "load_messages": round(max(0.0, extra) / loads, 1),
    }


def _fleets(results: Path) -> list[dict[str, Any]]:
    """Return the rows of fleet.py, smallest fleet first; empty if it has not run."""
    lines = results.read_text().splitlines() if results.is_file() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return sorted((row for row in rows if "workers" in row), key=lambda row: row["workers"])


def fleet_table(results: Path) -> Table:
    """Return the results of fleet.py as a table: the whole cost, and the three costs that it consists of."""
    found, rows = _fleets(results), []
    for row in found:
        workers, load, presence = row["workers"], row["load"], row["presence"]
        cpu, work, first = load["cpu"], row["work"]["cpu_milliseconds"], found[0]["work"]
        rate, loads = row["trajectories_per_second"], workers / row["step_seconds"]
        above = {
            part: 1e3 * (cpu[part] - presence["cpu"][part]) - first["cpu_milliseconds"][part] * rate
            for part in ("server", "workers")
        }
        messages = load["messages"] - presence["messages"] - first["messages"] * rate
        is_enough = workers >= _ENOUGH
        rows.append(
            (
                f"{workers:,}",
                f"{rate:.0f}",
                f"{row['whole']['messages']:.1f}, {row['work']['messages']:.1f}",
                f"{row['whole']['cpu_milliseconds']['all']:.2f}, {work['all']:.2f}",
                f"{work['learner']:.2f}",
                f"{presence['messages'] / workers:.1f}" if is_enough else "-",
                f"{sum(1e3 * presence['cpu'][part] / workers for part in presence['cpu']):.2f}" if is_enough else "-",
                f"{messages / loads:.1f}" if is_enough else "-",
                f"{sum(above.values()) / loads:.1f}" if is_enough else "-",
                f"{row['staleness_max']} of {row['max_staleness']}",
                f"{row['outstanding_max']} of {row['window']}",
                "clean" if row["is_clean"] else "NOT CLEAN",
                *(
                    f"{row['memory'][part]['max_megabytes']:.0f} ({row['memory'][part]['megabytes_per_minute']:+.1f})"
                    for part in ("server", "learner")
                ),
            )
        )
    head = (
        "workers",
        "trajectories/s",
        "messages: whole, work",
        "CPU ms: whole, work",
        "learner's",
        "messages/s a worker",
        "ms/s a worker",
        "messages a load",
        "ms a load",
        "staleness",
        "outstanding",
        "audit",
        "server MB (a minute)",
        "learner MB",
    )
    return "Per trajectory; per waiting worker; per load", head, rows
