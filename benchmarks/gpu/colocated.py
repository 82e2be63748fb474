"""Compare learner and engines on the same GPUs: in turns with all memory (run.colocated), or each with its own part.

    python -m benchmarks.gpu.colocated OUT.jsonl [--shape 0.6B] [--arms turns parts turns_one_step_off] [--gpus 2]

Each arm is one `asyncrl run` with a learner rank and an engine on each of --gpus GPUs. Reports trained tokens per
second, seconds of the hand-over, and the first GPU's used memory, read from nvidia-smi twenty times a second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, write_prompts

ARMS: Final[Mapping[str, tuple[str, bool, float]]] = {
    "turns": ("sync", True, 0.85),
    "parts": ("sync", False, 0.4),
    "turns_one_step_off": ("one_step_off", True, 0.85),
}
"""Mode, whether learner and engine take turns, and the engine's share of the memory."""
OF_STEPS: Final = (
    "learner/tokens_per_second",
    "learner/step_seconds",
    "learner/wait_seconds",
    "learner/gpus_wait_seconds",
    "learner/onload_seconds",
    "learner/offload_seconds",
    "weights/publish_seconds",
    "staleness/mean",
    "staleness/max",
)
_WARMUP: Final = 2
_LOOK_SECONDS: Final = 0.05
_LIMIT_SECONDS: Final = 240.0


class Memory:
    """Records the used MiB of the first GPU until it is closed."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        words = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "50"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append((time.time(), int(line)))

    def between(self, begin: float, end: float) -> dict[str, float]:
        used = [mib for at, mib in self.seen if begin <= at <= end]
        return {"memory_max_gib": max(used) / 1024, "memory_min_gib": min(used) / 1024} if used else {}

    def close(self) -> None:
        self._process.terminate()


def overrides(arm: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    mode, takes_turns, share = ARMS[arm]
    server = {
        "attention-backend": "triton",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-prefill-cuda-graph": True,
        "mem-fraction-static": share,
        "max-running-requests": 264,
        "cuda-graph-max-bs": 256,
    }
    return {
        "run.name": arm.replace("_", "-"),
        "run.directory": str(scratch / "runs"),
        "run.steps": options.steps,
        "run.mode": mode,
        "run.colocated": takes_turns,
        "model.path": str(scratch / "model"),
        "data.path": str(scratch / "prompts.jsonl"),
        "weights.directory": str(scratch / "weights"),
        "rollout.gpus": list(range(options.gpus)),
        "rollout.workers": options.gpus,
        "learner.gpus": list(range(options.gpus)),
        "learner.ranks": options.gpus,
        "rollout.max_new_tokens": options.length_max,
        "rollout.max_running": 8 * options.groups // options.gpus,  # an even share: no worker waits for another
        "learner.groups_per_batch": options.groups,
        "engine.options": {"server_arguments": server},
    }


def run(arm: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "asyncrl", "run", "benchmarks/gpu/modes.toml"]
    for key, value in overrides(arm, options, scratch).items():
        words += ["--set", f"{key}={_toml(value)}"]
    memory, began = Memory(), time.time()
    try:
        with (scratch / f"{arm}.log").open("w") as log:
            code = subprocess.run(words, stdout=log, stderr=log, timeout=_LIMIT_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    memory.close()
    folder = scratch / "runs" / arm.replace("_", "-")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row for row in rows if "learner/step_seconds" in row and row["step"] > _WARMUP]
    made: dict[str, Any] = {"arm": arm, "exit_code": code, "seconds": time.time() - began, "steps": len(steps)}
    if code or not steps:
        return made | {"log": (scratch / f"{arm}.log").read_text()[-3000:]}
    values = {name: [row[name] for row in steps if name in row] for name in OF_STEPS}
    made |= {name: statistics.median(found) for name, found in values.items() if found}
    made |= {name: value for name, value in steps[-1].items() if name.startswith("offpolicy/")}
    return made | memory.between(steps[0]["time"], steps[-1]["time"])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="rows are added there, one object a line")
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--groups", type=int, default=32, help="of eight samples, in a batch")
    parser.add_argument("--length-mean", type=float, default=300.0)
    parser.add_argument("--length-max", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7, help=f"of which {_WARMUP} are not counted")
    parser.add_argument("--logs", type=Path, help="folder for the runs' logs")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="colocated-", dir="/dev/shm"))
    try:
        words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(scratch / "model")]
        subprocess.run(words, check=True)
        lengths = Lengths(mean=options.length_mean, sigma=1.0, maximum=options.length_max, seed=0)
        write_prompts(scratch / "prompts.jsonl", metadata=lengths.as_metadata())
        for arm in options.arms:
            row = run(arm, options, scratch)
            print(json.dumps(row), flush=True)
            keep(
                row
                | {
                    "shape": options.shape,
                    "gpus": options.gpus,
                    "command": command("benchmarks.gpu.colocated"),
                    **machine(),
                },
                options.json,
            )
            if options.logs:
                shutil.copytree(
                    scratch / "runs" / arm.replace("_", "-") / "logs", options.logs / arm, dirs_exist_ok=True
                )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
