"""Compare learner and engines on the same GPUs: in turns with all memory (run.colocated), or each with its own part.

    python -m benchmarks.gpu.colocated OUT.jsonl [--shape 0.6B] [--arms turns parts turns_one_step_off] [--gpus 2]
    python -m benchmarks.gpu.colocated OUT.jsonl --gpus 2 --shape 30B-A3B:24 --set learner.expert_parallel=2 ...
    python -m benchmarks.gpu.colocated OUT.jsonl --gpus 8 ... --resume learner.tensor_parallel=2       another layout
    python -m benchmarks.gpu.colocated OUT.jsonl --rehearse --arms turns ...          tiny, without GPUs

Each arm is one `asyncrl run` with a learner rank and an engine on each of --gpus GPUs. Reports trained tokens per
second, seconds of the hand-over, restarts of processes, what each rank left in use on its GPU when it left, and each
GPU's used memory, read from nvidia-smi twenty times a second. With --resume each arm ends with a checkpoint, from which
it goes on for as many steps with these settings on top, such as another layout of the learner.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.arm import override_words, visible_devices
from benchmarks.gpu.fleet import has_gpu
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.modes import assignments
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
    "learner/mfu",
    "learner/memory_bytes",
    "weights/publish_seconds",
    "weights/pause_seconds",
    "staleness/mean",
    "staleness/max",
)
_LEFT: Final = re.compile(r"learner/rank\d+/(kept|used)_memory_bytes")
_WARMUP: Final = 2
_LOOK_SECONDS: Final = 0.05
_LIMIT_SECONDS: Final = 240.0


REHEARSAL: Final[Mapping[str, Any]] = {
    "shape": "tiny-moe",
    "groups": 2,
    "length_mean": 8.0,
    "length_max": 16,
    "steps": 4,
    "set": ["learner.threads=1", "learner.device='cpu'", "engine.device='cpu'", "model.dtype='float32'"],
}


class Memory:
    """Records the used MiB of the first ``gpus`` GPUs until it is closed."""

    def __init__(self, gpus: int) -> None:
        self.seen: list[tuple[float, int, int]] = []
        self._process: subprocess.Popen[str] | None = None
        if not gpus:
            return
        which = visible_devices(range(gpus))
        self._names = which.split(",")
        query = ["--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        words = ["nvidia-smi", f"--id={which}", *query, "-lms", "50"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            name, used = line.split(",")
            gpu = self._names.index(name) if name in self._names else int(name)
            self.seen.append((time.time(), gpu, int(used)))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return the most and the least of the first GPU as "memory_max_gib", of the next as "memory_max_gib_1"."""
        used: dict[int, list[int]] = {}
        for at, gpu, mib in self.seen:
            if begin <= at <= end:
                used.setdefault(gpu, []).append(mib)
        found = {}
        for gpu, mibs in sorted(used.items()):
            suffix = f"_{gpu}" if gpu else ""
            found[f"memory_max_gib{suffix}"] = max(mibs) / 1024
            found[f"memory_min_gib{suffix}"] = min(mibs) / 1024
        return found

    def close(self) -> None:
        if self._process is not None:
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
    gpus = list(range(options.gpus))
    places = {
        "rollout.gpus": gpus,
        "learner.gpus": gpus,
        "engine.options": {"server_arguments": server | options.engine},
    }
    return {
        "run.name": arm.replace("_", "-"),
        "run.directory": str(scratch / "runs"),
        "run.steps": options.steps,
        "run.mode": mode,
        "run.colocated": takes_turns,
        "model.path": str(options.model or scratch / "model"),
        "data.path": str(scratch / "prompts.jsonl"),
        "weights.directory": str(scratch / "weights"),
        "rollout.workers": options.gpus,
        "learner.ranks": options.gpus,
        "rollout.max_new_tokens": options.length_max,
        "rollout.max_running": 8 * options.groups // options.gpus,  # an even share: no worker waits for another
        "learner.groups_per_batch": options.groups,
        **(places if has_gpu() else {}),
        **({"checkpoint.every_steps": options.steps} if options.resume else {}),
        **options.set,
    }


def run(arm: str, options: argparse.Namespace, scratch: Path, *, resumes: bool = False) -> dict[str, Any]:
    """Return the row of an arm.  resumes: it goes on from its last step, with the settings of --resume"""
    words = [sys.executable, "-m", "asyncrl", "run", "benchmarks/gpu/modes.toml"]
    words += override_words(overrides(arm, options, scratch))
    if resumes:
        words += [*override_words({"run.steps": 2 * options.steps, **options.resume}), "--resume"]
    first = (options.steps if resumes else 0) + _WARMUP
    memory, began = Memory(options.gpus if has_gpu() else 0), time.time()
    try:
        with _output(scratch, arm).open("a") as log:
            code = subprocess.run(words, stdout=log, stderr=log, timeout=options.limit_seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    memory.close()
    path = _folder(scratch, arm) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row for row in rows if "learner/step_seconds" in row and row["step"] > first]
    name = f"{arm} resumed" if resumes else arm
    made: dict[str, Any] = {"arm": name, "exit_code": code, "seconds": time.time() - began, "steps": len(steps)}
    output = _output(scratch, arm).read_text()
    made |= {"restarts": output.count("; restart ")} | left_behind(rows)
    if code:
        made["log"] = output[-3000:]
    if not steps:
        return made
    values = {name: [row[name] for row in steps if name in row] for name in OF_STEPS}
    made |= {name: statistics.median(found) for name, found in values.items() if found}
    made |= {name: value for name, value in steps[-1].items() if name.startswith("offpolicy/")}
    return made | memory.between(steps[0]["time"], steps[-1]["time"])


def left_behind(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the most GiB that each rank's torch kept, and that were in use on its GPU, when the rank had left it."""
    names = sorted({name for row in rows for name in row if _LEFT.fullmatch(name)})
    return {name.replace("_bytes", "_gib"): max(row.get(name, 0) for row in rows) / 2**30 for name in names}


def keep_logs(arm: str, scratch: Path, folder: Path) -> None:
    """Copy what the run and its processes wrote to ``folder``. A run that did not start has only its own output."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (_output(scratch, arm), *sorted((_folder(scratch, arm) / "logs").glob("*"))):
        if path.is_file():
            shutil.copy(path, folder / path.name)


def _output(scratch: Path, arm: str) -> Path:
    return scratch / f"{arm}.log"


def _folder(scratch: Path, arm: str) -> Path:
    return scratch / "runs" / arm.replace("_", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="rows are added there, one object a line")
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of that shape (default: made)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--groups", type=int, default=32, help="of eight samples, in a batch")
    parser.add_argument("--length-mean", type=float, default=300.0)
    parser.add_argument("--length-max", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7, help=f"of which {_WARMUP} are not counted")
    parser.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS, help="for a run")
    parser.add_argument("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang servers")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file")
    parser.add_argument("--resume", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="resume arms with these")
    parser.add_argument("--logs", type=Path, help="folder for the runs' logs")
    parser.add_argument("--rehearse", action="store_true", help="a tiny mixture, without GPUs")
    options = parser.parse_args()
    if options.rehearse:
        settings = [*REHEARSAL["set"], *options.set]
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args()
        options.set = settings
    options.set, options.engine, options.resume = map(assignments, (options.set, options.engine, options.resume))
    scratch = Path(tempfile.mkdtemp(prefix="colocated-", dir="/dev/shm"))
    try:
        if options.model is None:
            words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(scratch / "model")]
            subprocess.run(words, check=True)
        lengths = Lengths(mean=options.length_mean, sigma=1.0, maximum=options.length_max, seed=0)
        write_prompts(scratch / "prompts.jsonl", metadata=lengths.as_metadata())
        for arm, resumes in itertools.product(options.arms, (False, True) if options.resume else (False,)):
            row = run(arm, options, scratch, resumes=resumes)
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
                keep_logs(arm, scratch, options.logs / arm)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
