"""Compare a small real model's training on the CPU of one machine: seconds a step, by runs that a user would start.

    python -m benchmarks.laptop --model runs/smollm2-135m --data runs/arithmetic.jsonl           12 minutes on two cores
    python -m benchmarks.laptop ... --trl ~/trl/bin/python    also TRL's own trainer, by a Python that has it

docs/start/small_model.md makes the model and the data. Arms: async (as it comes), async_spinning (OpenMP's threads spin
while they wait, as they do unless told otherwise), sync, and trl (benchmarks/laptop_trl.py). All train 4 prompts x 8
samples a step: the same prompts, reward, loss and optimizer. Arms run in turn, --windows times. A window is the time of
--steps steps behind the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

LOOK_SECONDS: Final = 0.2
ROOT: Final = Path(__file__).resolve().parents[1]
SETTINGS: Final[dict[str, Any]] = {
    "model.dtype": "float32",
    "data.max_prompt_tokens": 128,
    "reward.kind": "regex",
    "reward.options.pattern": r"\A\s*(\d+)",
    "rollout.workers": 1,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 12,
    "rollout.ignore_eos": True,
    "rollout.max_running": 32,
    "engine.kind": "inprocess",
    "engine.device": "cpu",
    "learner.device": "cpu",
    "learner.groups_per_batch": 4,
    "learner.micro_batch_tokens": 1024,
    "learner.learning_rate": 2e-5,
    "learner.betas": [0.9, 0.999],
    "checkpoint.every_steps": 0,
    "weights.keep": 2,
}
ARMS: Final[dict[str, tuple[str, dict[str, str], int]]] = {
    "async": ("async", {}, 3),
    "async_spinning": ("async", {"OMP_WAIT_POLICY": "ACTIVE"}, 3),
    "sync": ("sync", {}, 1),
}
"""run.mode, environment, and steps of warm-up."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step: seconds on the clock, and processor seconds of all processes, which other load hardly changes."""

    seconds: float
    cpu_seconds: float


def cpu_seconds_of(process: int) -> float:
    """Return the processor time so far of a process and of all that it started and that are alive (Linux only)."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(file.parent.name))
            used[int(file.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = [process]
    for one in family:
        family += children.get(one, [])
    return sum(used.get(one, 0.0) for one in family)


def run_asyncrl(arm: str, options: argparse.Namespace, scratch: Path) -> Cost:
    """Return what a step cost."""
    mode, environment, warmup = ARMS[arm]
    settings = SETTINGS | {
        "model.path": str(options.model),
        "data.path": str(options.data),
        "run.mode": mode,
        "run.name": arm,
        "run.directory": str(scratch),
        "run.steps": warmup + options.steps,
    }
    (scratch / "run.toml").write_text("")
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "asyncrl", "run", str(scratch / "run.toml")]
    command += [word for item in words for word in ("--set", item)]
    reports, used = scratch / arm / "metrics.jsonl", [0.0]  # after each step
    with (scratch / f"{arm}.out").open("wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
        while run.poll() is None:
            time.sleep(LOOK_SECONDS)
            done = reports.read_bytes().count(b"\n") if reports.exists() else 0
            used += [cpu_seconds_of(run.pid)] * (done + 1 - len(used))
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    rows = [json.loads(line) for line in reports.read_text().splitlines()]
    shutil.rmtree(scratch / arm)
    return Cost(
        seconds=float(rows[-1]["time"] - rows[warmup - 1]["time"]) / options.steps,
        cpu_seconds=(used[warmup + options.steps] - used[warmup]) / options.steps,
    )


def run_trl(options: argparse.Namespace, scratch: Path) -> Cost:
    """Return what a step cost."""
    command = [options.trl, str(ROOT / "benchmarks" / "laptop_trl.py"), str(options.model), str(options.data)]
    with (scratch / "trl.out").open("wb") as output:
        told = subprocess.run(
            [*command, str(options.steps), str(scratch / "trl")], stdout=subprocess.PIPE, stderr=output, check=True
        )
    cost = json.loads(told.stdout.splitlines()[-1])
    return Cost(seconds=cost["step_seconds"], cpu_seconds=cost["cpu_seconds"])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.laptop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="prompts with labels, .jsonl")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--trl", default="", metavar="PYTHON", help="a Python with TRL")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    options = parser.parse_args(given)
    options.model, options.data = options.model.absolute(), options.data.absolute()
    arms = [*options.arms, *(["trl"] if options.trl else [])]
    costs: dict[str, list[Cost]] = {arm: [] for arm in arms}
    for window in range(options.windows):
        for arm in arms:
            with tempfile.TemporaryDirectory(prefix="asyncrl-laptop-") as folder:
                scratch, began = Path(folder), time.monotonic()
                try:
                    step = run_trl(options, scratch) if arm == "trl" else run_asyncrl(arm, options, scratch)
                except subprocess.CalledProcessError:
                    print((scratch / f"{arm}.out").read_text()[-2000:], file=sys.stderr)
                    return 1
            costs[arm].append(step)
            row = {
                "arm": arm,
                "window": window,
                "step_seconds": step.seconds,
                "step_cpu_seconds": step.cpu_seconds,
                "steps": options.steps,
                "cores": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "command": shlex.join(["python", "-m", "benchmarks.laptop", *sys.argv[1:]]),
            }
            print(
                f"{arm:15s} window {window}: {step.seconds:6.2f} s a step, {step.cpu_seconds:6.2f} of processors "
                f"({time.monotonic() - began:.0f} s in all)",
                flush=True,
            )
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    base = np.median([one.seconds for one in costs[arms[0]]])
    print()
    for arm in arms:
        low, middle, high = np.quantile([one.seconds for one in costs[arm]], [0, 0.5, 1])
        cpu = np.median([one.cpu_seconds for one in costs[arm]])
        print(
            f"{arm:15s} {middle:6.2f} s a step ({low:.2f} to {high:.2f})   {middle / base:5.2f} x {arms[0]}"
            f"   {cpu:6.2f} s of processors"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
