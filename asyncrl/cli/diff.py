"""`asyncrl diff RUN_A RUN_B`: shows where two runs differ in settings, batches and metrics, and from which step.

Numbers are compared bit by bit (or within --tolerance) for each step, without metrics of clocks and machines. If a
resumed learner trained a step again, its last row counts. Exit code 0 if nothing differs; 1 if something does or the
runs share no step; 2 for a folder that holds no run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.cli import arguments
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError
from asyncrl.policies.health.faults import printable

if TYPE_CHECKING:
    from asyncrl.metrics.compare import Difference

SHOWN: Final = 20
"""Number of metrics to show; --json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="a run's folder")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="the other run's folder")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="SHARE", help="relative difference to ignore (default: 0)"
    )
    parser.add_argument("--clocks", action="store_true", help="also compare seconds and rates")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.tolerance < 1:
        raise ConfigError(f"--tolerance {options.tolerance:g}: must be in [0, 1)")

    from asyncrl.audit.opened_run import metric_rows
    from asyncrl.audit.run_folder import RecordedRun
    from asyncrl.metrics.compare import difference  # imports numpy; --help works without
    from asyncrl.policies.audit.entries import present

    settings, rows, batches = [], [], []
    for directory in (options.run_a, options.run_b):
        recorded = RecordedRun(directory)
        history = recorded.history()
        begun = [entry for entry in history if entry.kind == "begun"]
        settings.append(begun[-1].settings if begun else {})
        rows.append({int(row["step"]): row for row in metric_rows(recorded)})
        batches.append({entry.step: entry.groups for entry in present(history) if entry.kind == "trained"})
    found = difference(
        *((settings[0], settings[1]), (rows[0], rows[1]), (batches[0], batches[1])),
        tolerance=options.tolerance,
        with_clocks=options.clocks,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(found) | {"first": found.first, "same": found.is_none}))
    else:
        print(printable_lines(_lines(found, options.run_a, options.run_b)))
    return 0 if found.is_none and found.in_both else 1


def printable_lines(lines: Iterator[str]) -> str:
    return "\n".join(printable(line) for line in lines)


def _lines(found: Difference, a: Path, b: Path) -> Iterator[str]:
    yield f"a = {a}, b = {b}"
    yield "settings" if found.settings else "settings   the same"
    for key, (here, there) in found.settings.items():
        yield f"  {key:40s} {_value(here)}  ->  {_value(there)}"
    yield "steps      " + ", ".join(_steps(name, steps) for name, steps in zip("ab", found.steps, strict=True))
    if not found.in_both:
        yield "           no step is in both: no numbers were compared"
        return
    if found.batch is None:
        yield "batches    the same groups at each step"
    else:
        yield f"batches    of other groups from step {found.batch} on"
    if found.first is None:
        yield f"numbers    equal at each of {found.in_both:,} steps"
        return
    yield f"numbers    differ from step {found.first} on"
    yield f"  {'metric':36s} {'first':>7s} {'a':>13s} {'b':>13s}   at step {found.metrics[0].last:<5d} {'b':>13s}"
    for changed in found.metrics[:SHOWN]:
        values = [*changed.at_first, *changed.at_last]
        first_a, first_b, last_a, last_b = (_number(value) for value in values)
        yield f"  {changed.name:36s} {changed.first:7d} {first_a:>13s} {first_b:>13s} {last_a:>15s} {last_b:>13s}"
    if len(found.metrics) > SHOWN:
        yield f"  and {len(found.metrics) - SHOWN} more metrics (--json has all)"


def _steps(name: str, steps: tuple[int, int] | None) -> str:
    return f"{name} has none" if steps is None else f"{name} has {steps[0]} to {steps[1]}"


def _value(value: Any) -> str:
    return "-" if value is None else toml_text(value)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float | int) else "(list)"
