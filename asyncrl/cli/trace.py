"""`asyncrl trace RUN_DIR`: writes a timeline of a run for ui.perfetto.dev or chrome://tracing.

The source is RUN_DIR/timeline.jsonl, which the learner writes (metrics.timeline_max_bytes). It shows steps, waits,
weights and checkpoints of the learner; groups, reward calls, loads and waits of each worker; and the path of each group
from its prompt to the step that trained it. Evaluations come from metrics.jsonl. The run may be running.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument("--steps", default="", metavar="A:B", help="steps A to B, B included (default: the last 200)")
    parser.add_argument("--out", type=Path, help="file to write (default: RUN_DIR/trace.json)")


def run(options: argparse.Namespace) -> int:
    first, last = arguments.step_range(options.steps, flag="--steps")
    directory: Path = options.run_directory

    from asyncrl.audit.timeline import evaluations_of, read_rows
    from asyncrl.metrics.trace import num_evaluations, trace  # imports numpy; --help works without

    rows = read_rows(directory)
    if not rows:
        raise ConfigError(f"{directory}: no step is recorded there (metrics.timeline_max_bytes)")
    chosen = [row for row in rows if first <= row["step"] <= last] if options.steps else rows[-200:]
    if not chosen:
        raise ConfigError(
            f"--steps {options.steps}: timeline.jsonl has steps {rows[0]['step']} to {rows[-1]['step']}; the oldest "
            "are gone if it is over metrics.timeline_max_bytes"
        )
    out = options.out or directory / "trace.json"
    made = trace(chosen, evaluations_of(directory))
    try:
        out.write_text(json.dumps(made))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    _say(options.json, out, made, chosen, num_evaluations=num_evaluations(made))
    return 0


def _say(as_json: bool, out: Path, made: dict[str, Any], rows: list[dict[str, Any]], *, num_evaluations: int) -> None:
    found = {
        "out": str(out),
        "first_step": rows[0]["step"],
        "last_step": rows[-1]["step"],
        "events": len(made["traceEvents"]),
        "groups": sum(len(row.get("groups", ())) for row in rows),
        "evaluations": num_evaluations,
    }
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"{out}: steps {found['first_step']} to {found['last_step']}, {found['groups']:,} groups, "
        f"{num_evaluations:,} evaluation{'s' * (num_evaluations != 1)}, {found['events']:,} events; "
        "open it at ui.perfetto.dev or chrome://tracing"
    )
