"""Measure how soon a joining worker contributes to a run, and whether a leaving worker loses anything.

    python -m benchmarks.join [--joins N] [--json FILE]

Runs the demo's task with real processes on a real nats-server. Each worker gets the bus and the run's name, and starts
in an empty folder. Half of the workers leave by SIGTERM, half by SIGKILL.

start  from the command until its engine is up: imports, settings from the bus, the model's weights
join   from then until the end of the learner's first step that trains one of its groups: the promise is 10 s
audit  audit of the whole run after the last worker: lost and duplicated must be 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.harness.run_process import RunProcess

PROMISE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    worker: str
    start_seconds: float
    join_seconds: float
    left_by: str

    def __str__(self) -> str:
        return f"{self.worker:8s}{self.start_seconds:9.1f}{self.join_seconds:9.2f}   {self.left_by}"


async def measure(folder: Path, joins: int) -> tuple[list[Join], dict[str, Any]]:
    run = RunProcess(folder / "run")
    away = folder / "away"
    away.mkdir()
    found = []
    run.start()
    try:
        async with run.heard():
            await run.until(lambda: run.event("first_trained", "w0"), "a step")
            for number in range(joins):
                how = (signal.SIGTERM, signal.SIGKILL)[number % 2]
                found.append(await _join(run, f"x{number}", away, leave_by=how))
                print(found[-1], flush=True)
            await asyncio.to_thread(run.drain)
    finally:
        run.kill()
    return found, await asyncio.to_thread(run.audit)


async def _join(run: RunProcess, name: str, away: Path, *, leave_by: signal.Signals) -> Join:
    began = time.time()
    worker = run.join(name, folder=away)
    try:
        await run.until(lambda: run.event("first_trained", name), f"something of {name} trained")
    finally:
        worker.send_signal(leave_by)
        await asyncio.to_thread(worker.wait, 60)
    joined, trained = run.event("joined", name), run.event("first_trained", name)
    assert joined is not None and trained is not None
    return Join(
        worker=name,
        start_seconds=joined.time - began,
        join_seconds=trained.time - joined.time,
        left_by=leave_by.name,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join", description=__doc__.partition("\n")[0])
    parser.add_argument("--joins", type=int, default=6, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(f"{'worker':8s}{'start s':>9s}{'join s':>9s}   left by")
    with tempfile.TemporaryDirectory() as folder:
        joins, audit = asyncio.run(measure(Path(folder), options.joins))
    worst = max(join.join_seconds for join in joins)
    kept = {name: audit[name] for name in ("code", "steps", "published", "trained", "dropped", "lost", "duplicated")}
    print(f"join: worst {worst:.2f} s of {PROMISE_SECONDS:.0f} s allowed; audit: {kept}")
    if options.json:
        machine = {
            "command": f"python -m benchmarks.join --joins {options.joins}",
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "commit": _commit(),
        }
        rows = [{"machine": machine}, *map(asdict, joins), {"worst_join_seconds": worst, "audit": kept}]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if worst <= PROMISE_SECONDS and audit["code"] == 0 else 1


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
