"""Compare the prediction of `asyncrl plan` with a real run: one learner and one engine, case by case.

    python -m benchmarks.gpu.planning --json docs/results/gpu/planning.jsonl   0.6B, two GPUs, 5 to 9 minutes a case
    python -m benchmarks.gpu.planning --rehearse                               tiny, on a CPU: shows that it works

For each case: the plan's prediction for one learner and one engine, and the trained tokens per second of a real run
with the same settings, over the steps after the window is filled. The lengths of answers are drawn in advance, not
sampled (benchmarks/gpu/lengths.py), and the model has random weights. The goal is a prediction within 15 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.fleet import GPU_ARGUMENTS
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model, write_prompts
from benchmarks.gpu.start import as_toml, environment

HEAD: Final = "case               predicted tok/s  measured tok/s  predicted/measured  best bound  plan s  run s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    length_mean  mean length of answers
    groups       groups of 8 answers per batch
    seconds      time to measure each side
    steps        steps of the run
    """

    length_mean: int
    length_max: int
    groups: int
    max_staleness: int = 4
    seconds: float = 30.0
    steps: int = 16


CASES: Final[Mapping[str, Case]] = {
    "short answers": Case(length_mean=100, length_max=512, groups=64, steps=30),
    "long answers": Case(length_mean=500, length_max=4096, groups=16, steps=60),
    "large batches": Case(length_mean=250, length_max=2048, groups=64),
}
REHEARSAL: Final = {"rehearsal": Case(length_mean=6, length_max=16, groups=4, seconds=3.0, steps=20)}


def overrides(case: Case, scratch: Path, *, is_rehearsal: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run.directory": str(scratch / "runs"),
        "model.path": str(scratch / "model"),
        "data.path": str(scratch / "prompts.jsonl"),
        "weights.directory": str(scratch / "weights"),
        "rollout.workers": 1,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": case.length_max,
        "rollout.max_running": 256,
        "learner.groups_per_batch": case.groups,
        "staleness.max_staleness": case.max_staleness,
    }
    if is_rehearsal:
        return made | {"model.dtype": "float32", "learner.device": "cpu", "engine.kind": "inprocess"}
    server = {**GPU_ARGUMENTS, "cuda-graph-max-bs": 264}
    return made | {"engine.options.server_arguments": server, "weights.channel": "nccl"}


def asked(verb: str, settings: Mapping[str, Any], log: Path, *words: str, limit: float) -> str:
    """Run `asyncrl VERB` and return its stdout; stderr goes to ``log``. Raises CalledProcessError, TimeoutExpired."""
    line = [sys.executable, "-m", "asyncrl", verb, "benchmarks/gpu/modes.toml", *words]
    for key, value in settings.items():
        line += ["--set", f"{key}={as_toml(value)}"]
    with log.open("w") as file:
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=file, text=True, timeout=limit, check=True, env=environment()
        )
    return done.stdout


def measured(rows: Sequence[Mapping[str, Any]], *, warmup: int) -> float:
    """Return trained tokens per second from the end of step ``warmup`` to the end of the last step."""
    counted = rows[warmup:]
    return float(sum(row["length/trained_tokens"] for row in counted) / (rows[-1]["time"] - rows[warmup - 1]["time"]))


def compare(name: str, case: Case, scratch: Path, *, is_rehearsal: bool, limit: float) -> dict[str, Any]:
    settings = overrides(case, scratch, is_rehearsal=is_rehearsal)
    lengths = Lengths(mean=case.length_mean, sigma=1.0, maximum=case.length_max, seed=0)
    write_prompts(scratch / "prompts.jsonl", metadata=lengths.as_metadata())
    began = time.monotonic()
    words = ("--gpus", "2", "--seconds", f"{case.seconds:g}", "--json")
    plan = json.loads(asked("plan", settings, scratch / "plan.log", *words, limit=limit))
    planned = time.monotonic()
    run = settings | {"run.name": name.replace(" ", "-"), "run.steps": case.steps}
    asked("run", run, scratch / "run.log", limit=limit)
    ended = time.monotonic()
    lines = (scratch / "runs" / run["run.name"] / "metrics.jsonl").read_text().splitlines()
    reached = measured([json.loads(line) for line in lines], warmup=case.max_staleness + 2)
    return {
        "case": name,
        **settings,
        "plan": plan,
        "predicted_tokens_per_second": plan["now"]["tokens_per_second"],
        "measured_tokens_per_second": reached,
        "ratio": plan["now"]["tokens_per_second"] / reached,
        "plan_seconds": planned - began,
        "run_seconds": ended - planned,
    }


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['case']:17s}  {row['predicted_tokens_per_second']:15,.0f}  {row['measured_tokens_per_second']:14,.0f}  "
        f"{row['ratio']:18.2f}  {row['plan']['best']['max_staleness']:10d}  {row['plan_seconds']:6.0f}  "
        f"{row['run_seconds']:5.0f}"
    )


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="0.6B", choices=SHAPES, help="of the model (default 0.6B)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS", help="of a plan, and of a run")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    options = parser.parse_args(given)
    shape = "tiny" if options.rehearse else options.shape
    cases = REHEARSAL if options.rehearse else {name: CASES[name] for name in options.cases}
    is_whole = True
    with tempfile.TemporaryDirectory(prefix="asyncrl-planning-") as folder:
        scratch = Path(folder)
        make_model(SHAPES[shape], scratch / "model", dtype="float32" if options.rehearse else "bfloat16")
        print(HEAD)
        for name, case in cases.items():
            try:
                row = compare(name, case, scratch, is_rehearsal=options.rehearse, limit=options.limit)
            except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
                is_whole = False
                print(f"{name:17s}  FAILED: {error!r}", flush=True)
                for log in (scratch / "plan.log", scratch / "run.log"):
                    if log.exists():
                        print("\n".join(log.read_text().splitlines()[-15:]), file=sys.stderr, flush=True)
                continue
            print(line(row), flush=True)
            keep(
                row | {"model": shape, **machine(), "command": command("benchmarks.gpu.planning", given)}, options.json
            )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
