"""Try the drift alarm on the real loop: bin/demo's run on a CPU, at rates up to ones that ruin it.

    python -m benchmarks.old_tokens.real_loop --json docs/results/drift_alarm.jsonl

Learner, bus and engine share this process. Each arm is run once a seed, interleaved. A run whose row is there is not
repeated. A run is lost if it ends over --lost below the synchronous run of its seed, at the demo's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.config.metrics import MetricsSection
from asyncrl.data import demo_task
from asyncrl.metrics.drift import DriftAlarm
from benchmarks.gpu.rows import keep, read

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
ARMS = ((3e-3, 0), (3e-3, 4), (1e-2, 0), (1e-2, 4), (3e-2, 0), (3e-2, 4))
"""Learning rate, staleness.max_staleness. The demo has 3e-3 and 4."""

Row = dict[str, Any]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.old_tokens.real_loop", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lost", type=float, default=0.1)
    parser.add_argument("--print", action="store_true", help="run nothing, print what is there")
    options = parser.parse_args(given)
    if options.print:
        logging.disable()
        report(read(options.json), by=options.lost)
        return 0
    done = {(row["rate"], row["bound"], row["seed"]) for row in read(options.json)}
    for seed in options.seeds:
        for rate, bound in ARMS:
            if (rate, bound, seed) not in done:
                row = run(rate, bound, seed=seed, steps=options.steps)
                keep(row, options.json)
                print(json.dumps({key: value for key, value in row.items() if key != "drift"}), flush=True)
    report(read(options.json), by=options.lost)
    return 0


def run(rate: float, bound: int, *, seed: int, steps: int) -> Row:
    """Train the demo at a constant learning rate after its warm-up, and return the row."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-drift-") as name:
        folder = Path(name)
        demo_task.write(folder, seed=seed)
        held_out = {"name": "held_out", "path": str(folder / "held_out.jsonl"), "samples": 4}
        settings: dict[str, object] = {
            "bus.kind": "memory",
            "run.directory": str(folder / "runs"),
            "run.mode": "async" if bound else "sync",
            "run.seed": seed,
            "run.steps": steps,
            "model.path": str(folder / "model"),
            "data.path": str(folder / "prompts.jsonl"),
            "learner.backend": "reference",
            "learner.learning_rate": rate,
            "learner.schedule": "constant",
            "learner.min_learning_rate": 0.0,
            "learner.decay_steps": 0,
            "staleness.max_staleness": bound,
            "rollout.workers": 1,
            "checkpoint.every_steps": 0,
            "evaluation.at_start": False,
            "evaluation.share": 1.0,
            "evaluation.datasets": [held_out],
            "metrics.console": False,
        }
        made = asyncrl.Run.from_file(DEMO, overrides=settings)
        result = asyncio.run(made.train())
        rows = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "offpolicy/drift" in row]
    rang = [row["step"] for row in trained if row.get("alarm/drift")]
    return {
        "rate": rate,
        "bound": bound,
        "seed": seed,
        "steps": result.steps,
        "held_out": next(one for row in reversed(rows) if (one := row.get("evaluation/held_out/mean@4")) is not None),
        "best_reward": max(row["reward/mean"] for row in trained),
        "staleness": round(statistics.fmean(row["staleness/mean"] for row in trained), 2),
        "rang_at": rang[0] if rang else 0,
        "alarms": sorted({key for row in trained for key, on in row.items() if key.startswith("alarm/") and on}),
        "drift": [round(row["offpolicy/drift"], 4) for row in trained],
    }


def rang_at(row: Row) -> int:
    """Return the first step with the alarm at today's threshold, from 1; 0 if there is none."""
    alarm = DriftAlarm(MetricsSection().drift_alarm)
    for step, drift in enumerate(row["drift"], 1):
        alarm.update({"offpolicy/k3": drift * 1.01, "entropy": 1.0})
        if alarm.is_on:
            return step
    return 0


def report(rows: Sequence[Row], *, by: float) -> None:
    """Print each arm, and both error rates of the alarm."""
    synchronous = {row["seed"]: row["held_out"] for row in rows if (row["rate"], row["bound"]) == ARMS[0]}
    for rate, bound in sorted({(row["rate"], row["bound"]) for row in rows}):
        arm = [row for row in rows if (row["rate"], row["bound"]) == (rate, bound)]
        held_out = ", ".join(f"{row['held_out']:.2f}" for row in arm)
        print(f"{rate:7.0e}  <= {bound}  held out {held_out}  rang at {[rang_at(row) for row in arm]}")
    for is_old, name in ((True, "with old tokens"), (False, "synchronous")):
        lost, others = 0, 0
        rang = {True: 0, False: 0}
        for row in (row for row in rows if bool(row["bound"]) == is_old):
            is_lost = row["held_out"] < synchronous[row["seed"]] - by
            lost, others = lost + is_lost, others + (not is_lost)
            rang[is_lost] += rang_at(row) > 0
        print(
            f"{name}: the drift alarm rang in {rang[True]} of {lost} lost runs and in {rang[False]} of {others} others"
        )


if __name__ == "__main__":
    raise SystemExit(main())
