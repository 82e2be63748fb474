"""Measure the start of `asyncrl run`: time to the first sample's start, the first complete group, and the first step.

    python -m benchmarks.gpu.start                     0.6B, one learner GPU and one engine, three starts
    python -m benchmarks.gpu.start --rehearse          tiny, on a CPU: shows that all of it works

Each start is a separate run of two steps, one after another. On a fresh machine the first run compiles the engine's and
the learner's kernels, and the next ones reuse them. The last row is a resumed run. Python writes bytecode even if
PYTHONDONTWRITEBYTECODE is set, because SGLang imports 7,000 modules in each of two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.arm import override_words
from benchmarks.gpu.fleet import GPU_ARGUMENTS
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model, write_prompts

_LIMIT_SECONDS: Final = 300.0
_STEPS: Final = 2
HEAD: Final = "start      began s  answered s  trained s  ended s"


def overrides(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run.directory": str(scratch / "runs"),
        "model.path": str(scratch / "model"),
        "data.path": str(scratch / "prompts.jsonl"),
        "weights.directory": str(scratch / "weights"),
        "rollout.function": "single_turn",
        "rollout.workers": 1,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 64,
        "reward.kind": "random",
        "learner.groups_per_batch": 8,
        "checkpoint.every_steps": 1,
    }
    if options.rehearse:
        return made | {"model.dtype": "float32", "learner.device": "cpu", "engine.kind": "inprocess"}
    server = {**GPU_ARGUMENTS, "cuda-graph-max-bs": 256}
    return made | {"engine.options.server_arguments": server, "weights.channel": "nccl"}


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def start(name: str, options: argparse.Namespace, scratch: Path, *, steps: int, resume: bool) -> dict[str, Any]:
    """Measure one start. Its Unix times come from the same machine's clock as its processes' times."""
    words = [sys.executable, "-m", "asyncrl", "run", "benchmarks/gpu/modes.toml", *(["--resume"] if resume else [])]
    words += override_words(overrides(options, scratch) | {"run.name": name, "run.steps": steps})
    log = scratch / f"{name}-{steps}.log"
    since = time.time()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words, stdout=file, stderr=file, timeout=_LIMIT_SECONDS, check=False, env=environment()
            ).returncode
        except subprocess.TimeoutExpired:  # its child processes end with it
            code = -1
    ended = time.time() - since
    path = scratch / "runs" / name / "timeline.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [line for line in lines if line["time"] > since]
    groups = [group for line in lines for group in line["groups"] if group[3] > since]
    if code or not groups:
        return {"exit_code": code, "log": log.read_text()[-3000:]}
    return {
        "began_seconds": min(group[3] for group in groups) - since,
        "answered_seconds": min(group[6] for group in groups) - since,
        "trained_seconds": lines[0]["time"] - since,
        "ended_seconds": ended,
    }


def line(row: Mapping[str, Any]) -> str:
    if "log" in row:
        return f"{row['start']:9s}  FAILED ({row['exit_code']}): {row['log'].splitlines()[-1:]}"
    seconds = f"{row['began_seconds']:7.1f}  {row['answered_seconds']:10.1f}  {row['trained_seconds']:9.1f}"
    return f"{row['start']:9s}  {seconds}  {row['ended_seconds']:7.1f}"


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a start failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6B", choices=SHAPES, help="of the model (default 0.6B)")
    parser.add_argument("--starts", type=int, default=3, help="of new runs (default 3)")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    options = parser.parse_args(given)
    shape = "tiny" if options.rehearse else options.shape
    is_whole = True
    with tempfile.TemporaryDirectory(prefix="asyncrl-start-") as name:
        scratch = Path(name)
        make_model(SHAPES[shape], scratch / "model", dtype="float32" if options.rehearse else "bfloat16")
        write_prompts(scratch / "prompts.jsonl", metadata={})
        print(HEAD)
        resumed = f"start-{options.starts}"
        for number in range(1, options.starts + 2):
            is_resumed = number > options.starts
            made = start(
                resumed if is_resumed else f"start-{number}",
                options,
                scratch,
                steps=2 * _STEPS if is_resumed else _STEPS,
                resume=is_resumed,
            )
            row = {"start": "resumed" if is_resumed else str(number), "model": shape, **made, **machine()}
            row["bytecode"] = True
            row["command"] = command("benchmarks.gpu.start", given)
            print(line(row), flush=True)
            keep(row, options.json)
            is_whole = is_whole and "log" not in made
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
