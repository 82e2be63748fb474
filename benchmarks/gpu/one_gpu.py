"""Compare asynchronous and synchronous training on ONE GPU, by the runs that a user would start: tokens per second.

    python -m benchmarks.gpu.one_gpu --shape 0.6B --arms async sync async sync --json docs/results/gpu/one_gpu.jsonl
    python -m benchmarks.gpu.one_gpu --rehearse      tiny, on a CPU: shows that all of it works

Each arm is one `asyncrl run`: nats-server, learner, rollout worker and SGLang server on one GPU, which all start anew.
Name arms in turn (async sync async sync) to interleave them. An arm is measured from the end of its warm-up in
--windows windows of --seconds each, one after the other; a window ends with the first step that is over behind it.

Arms: async (the engine goes on during the step), sync; with "_files" weights go through a folder in memory, not on
the device; with "_pause" the engine stops for each step (rollout.beside_learner); with "_mps" kernels of both processes
run side by side (mps.py), not by turns. sync leaves out staleness.discard of --set, which it has no use for. With --set
learner.gpus=[0] rollout.gpus=[1,2] rollout.workers=2 the same arms run on three GPUs. Rows have the used memory of each
GPU until the first step is over (gpu_memory_of_start) and in the window (gpu_memory), and the times at which the arm's
steps ended (step_ended). With --plan they have what `asyncrl plan` predicts of the run (planned_tokens_per_second).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu import mps
from benchmarks.gpu.arm import REPOSITORY, override_words, read_rows, started, tail
from benchmarks.gpu.colocated import Memory
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, write_prompts
from benchmarks.gpu.window import Row, measure

RUN_FILE: Final = "benchmarks/gpu/modes.toml"
_ARM: Final = re.compile(r"(async|sync)(_files)?(_pause)?(?:_mps)?")
_STEPS: Final = 200
"""More than any arm takes: the log must have room for all of them."""
_MISMATCH: Final = ("mismatch/mean", "mismatch/routing_replayed", "mismatch/routing_own")
_PREFILL_GRAPHS: Final = "disable-prefill-cuda-graph"
REHEARSAL: Final[Mapping[str, Any]] = {
    "shape": "tiny",
    "groups": 4,
    "group_size": 4,
    "length_mean": 24.0,
    "length_max": 96,
    "running": 16,
    "seconds": 2.0,
    "windows": 2,
    "max_staleness": 2,
    "set": ["learner.threads=1", "engine.kind='inprocess'", "engine.device='cpu'", "learner.device='cpu'"],
}
HEAD: Final = (
    "arm                window     tok/s  sampled/s  learner idle  engine idle  step s  train s  staleness mean  max"
    "  publish s  pause p50   p99 ms  memory GiB  steps"
)


def line(row: Row) -> str:
    start = f"{row['arm']:18s} "
    if "error" in row:
        return f"{start}FAILED: {row['error']}"
    return (
        f"{start}{row['window']:6d}  {row['tokens_per_second']:8,.0f}  {row['sampled_tokens_per_second']:9,.0f}"
        f"  {row['learner_idle']:12.1%}  {row['engine_idle']:11.1%}  {row['step_seconds']:6.2f}"
        f"  {row['train_seconds']:7.2f}  {row['staleness_mean']:14.2f}  {row['staleness_max']:3d}"
        f"  {row['publish_seconds']:9.2f}  {1e3 * row['pause_p50']:9.0f}  {1e3 * row['pause_p99']:7.0f}"
        f"  {row['memory_gib']:10.1f}  {row['steps']:5d}"
    )


def run_parser(module: str, doc: str | None, *, arms: Sequence[str], seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that is a run on one GPU."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", nargs="+", default=list(arms), metavar="ARM", help="in this order")
    add("--shape", choices=SHAPES, default="0.6B", help="of the model (default 0.6B)")
    add("--model", type=Path, metavar="FOLDER", help="of that shape, from benchmarks.gpu.shapes (default: made)")
    add("--groups", type=int, default=64, help="groups per batch (default 64)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=float, default=500.0, help="tokens of an answer, before the cut (default 500)")
    add("--length-max", type=int, default=4096, help="where lengths are cut (default 4096)")
    add("--running", type=int, default=384, help="sequences that the engine may run (default 384)")
    add("--max-staleness", type=int, default=4, help="of async (default 4)")
    add("--seconds", type=float, default=seconds, help=f"of a window (default {seconds:g})")
    add("--limit", type=float, default=400.0, help="seconds an arm may take with its start (default 400)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang server")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file, for every arm")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--out", type=Path, metavar="FOLDER", help="logs of the arms are copied there")
    add("--rehearse", action="store_true", help="tiny, on a CPU")
    return parser


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None, *, arm: re.Pattern[str]) -> argparse.Namespace:
    """Return the options; with --rehearse REHEARSAL's are the defaults.  arm: matches every arm that there is"""
    options = parser.parse_args(given)
    if options.rehearse:
        known = vars(options)
        settings = [*REHEARSAL["set"], *options.set]
        parser.set_defaults(**{key: value for key, value in REHEARSAL.items() if key in known})
        options = parser.parse_args(given)
        options.set = settings
    for name in options.arms:
        if not arm.fullmatch(name):
            parser.error(f"{name!r}: no such arm")
    options.set, options.engine = assignments(options.set), assignments(options.engine)
    return options


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    arms = ("async", "sync", "async", "sync")
    parser = run_parser("benchmarks.gpu.one_gpu", __doc__, arms=arms, seconds=45.0)
    parser.add_argument("--windows", type=int, default=1, help="windows of each arm (default 1)")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the first (default: 1; async: bound + 1)")
    parser.add_argument("--plan", type=float, default=0.0, metavar="SECONDS", help="measure this long for a plan first")
    options = parse(parser, given, arm=_ARM)
    if any("_mps" in name for name in options.arms) and not mps.is_there():
        parser.error("--arms: this machine has no nvidia-cuda-mps-control, which arms with _mps need")
    return options


def overrides(arm: str, name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    found = _ARM.fullmatch(arm)
    assert found is not None
    mode, files, pauses = found.groups()
    server = {**GPU_ARGUMENTS, _PREFILL_GRAPHS: True, "cuda-graph-max-bs": 512, **options.engine}
    return {
        "run.name": name,
        "run.directory": scratch / "runs",
        "run.mode": mode,
        "run.steps": _STEPS,
        "model.path": options.model or scratch / "model",
        "model.dtype": "bfloat16" if has_gpu() else "float32",
        "data.path": scratch / "prompts.jsonl",
        "rollout.workers": 1,
        "rollout.group_size": options.group_size,
        "rollout.max_new_tokens": options.length_max,
        "rollout.max_running": options.running if mode == "async" else options.groups * options.group_size,
        "learner.groups_per_batch": options.groups,
        "staleness.max_staleness": options.max_staleness,
        "weights.directory": scratch / "weights",
        "bus.max_log_bytes": 2**33,
        "bus.max_message_bytes": 2**25,
        **({"engine.options.server_arguments": server} if has_gpu() else {}),
        **({"weights.channel": "files"} if files else {}),
        **({"rollout.beside_learner": "pause"} if pauses else {}),
        **{key: value for key, value in options.set.items() if mode == "async" or key != "staleness.discard"},
    }


def run_arm(arm: str, number: int, options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Return the rows of the arm's windows, or one with its error."""
    name = f"{arm}-{number}"
    settings = override_words(overrides(arm, name, options, scratch))
    words = ["-m", "asyncrl", "run", RUN_FILE, *settings]
    planned = plan(settings, options, scratch / f"{name}.plan") if options.plan else {}
    folder = scratch / "runs" / name
    began = time.monotonic()
    output = (options.out or scratch) / f"{name}.out"
    warmup = options.warmup or (options.max_staleness if arm.startswith("async") else 0) + 1
    problem = ""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        stack.callback(put_away, name, output, options, scratch)
        memory = watched_memory(options, stack)
        environment = stack.enter_context(mps.served(scratch / f"mps-{number}")) if "_mps" in arm else {}
        with started(words, output, environment=environment) as process:
            while not (parts := windows(rows, warmup, options))[0]:
                time.sleep(0.5)
                if process.poll() is not None:
                    problem = f"the run ended with exit code {process.returncode}"
                elif time.monotonic() - began > options.limit:
                    problem = f"only {len(rows)} steps in {options.limit:.0f} s"
                if problem:
                    break
                rows = read_rows(folder / "metrics.jsonl")
        found = [part | used(memory, part["began"], part["ended"], "gpu_memory") for part in parts[1]]
        of_start = used(memory, 0.0, rows[0]["time"] if rows else math.inf, "gpu_memory_of_start")
        print(tail(output) if problem else "", flush=True)
    common = {"arm": arm, "number": number, "shape": options.shape, "command": command("benchmarks.gpu.one_gpu")}
    common |= {"groups": options.groups, "group_size": options.group_size, **of_start, **machine(), **planned}
    common |= {"step_ended": [row["time"] for row in rows]}
    windows_of_arm = [{**common, "window": index, **part} for index, part in enumerate(found)]
    return [*windows_of_arm, {**common, "error": problem}] if problem else windows_of_arm


def plan(settings: Sequence[str], options: argparse.Namespace, log: Path) -> Row:
    """Return what `asyncrl plan` predicts of a run with ``settings``. Raises CalledProcessError if it fails."""
    gpus = {*options.set.get("learner.gpus", [0]), *options.set.get("rollout.gpus", [0])}
    processes = options.set.get("learner.ranks", 1) + options.set.get("rollout.workers", 1)
    count = len(gpus) if has_gpu() else processes
    words = ["--gpus", str(count), "--seconds", f"{options.plan:g}", "--json"]
    began = time.monotonic()
    with log.open("w") as said:
        line = [sys.executable, "-m", "asyncrl", "plan", RUN_FILE, *settings, *words]
        done = subprocess.run(line, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=said, text=True, check=False)
    if done.returncode:
        print(tail(log), flush=True)
    done.check_returncode()
    found = json.loads(done.stdout)
    print(f"planned in {time.monotonic() - began:.0f} s: {found['now']['tokens_per_second']:,.0f} tok/s", flush=True)
    return {"plan": found, "planned_tokens_per_second": found["now"]["tokens_per_second"]}


def put_away(name: str, output: Path, options: argparse.Namespace, scratch: Path) -> None:
    """Copy an arm's logs to --out, and remove what it wrote."""
    folder = scratch / "runs" / name
    if options.out is not None:
        with contextlib.suppress(OSError):
            shutil.copytree(folder / "logs", options.out / name, dirs_exist_ok=True)
            shutil.copyfile(folder / "metrics.jsonl", options.out / f"{name}.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(scratch / "weights", ignore_errors=True)
    time.sleep(5 if has_gpu() else 0)  # until the driver has taken the memory back


def watched_memory(options: argparse.Namespace, stack: contextlib.ExitStack) -> Memory | None:
    """Record the memory of the GPUs that the run uses until the stack is closed; None on a machine without GPUs."""
    if not has_gpu():
        return None
    gpus = [*options.set.get("learner.gpus", [0]), *options.set.get("rollout.gpus", [0])]
    memory = Memory(max(gpus) + 1)
    stack.callback(memory.close)
    return memory


def used(memory: Memory | None, begin: float, end: float, name: str) -> Row:
    return {name: memory.between(begin, end)} if memory is not None else {}


def windows(rows: Sequence[Row], warmup: int, options: argparse.Namespace) -> tuple[bool, list[Row]]:
    """Return whether all windows are full, and the rows of those that are."""
    found: list[Row] = []
    first = warmup
    while len(found) < options.windows:
        start = rows[first - 1]["time"] if len(rows) >= first else None
        last = next((index for index, row in enumerate(rows) if start and row["time"] - start >= options.seconds), None)
        if last is None:
            return False, found
        found.append(measure_run(rows[first - 1 : last + 1]))
        first = last + 1
    return True, found


def measure_run(rows: Sequence[Row]) -> Row:
    """Measure from the end of the first row's step to the end of the last one's."""
    steps = rows[1:]
    pauses = [row["weights/pause_seconds"] for row in steps if row.get("weights/pause_seconds")]

    def mean(name: str) -> float:
        return float(np.mean([row.get(name) or 0.0 for row in steps]))

    return {
        **measure(rows, [], warmup=1),
        "began": rows[0]["time"],
        "ended": rows[-1]["time"],
        "sampled_tokens_per_second": mean("rollout/tokens_per_second"),
        "engine_idle": mean("rollout/idle_ratio"),
        "engine_running": mean("rollout/running"),
        "pause_p50": float(np.quantile(pauses, 0.5)) if pauses else 0.0,
        "pause_p99": float(np.quantile(pauses, 0.99)) if pauses else 0.0,
        "memory_gib": max(row.get("learner/memory_bytes") or 0 for row in steps) / 2**30,
        **{name: mean(name) for name in sorted({name for row in steps for name in row if name in _MISMATCH})},
    }


def ratios(rows: Sequence[Row]) -> list[str]:
    """Compare each kind of arm with sync: medians over all windows."""
    by_arm: dict[str, list[float]] = {}
    for row in rows:
        if "error" not in row:
            by_arm.setdefault(row["arm"], []).append(row["tokens_per_second"])
    base = by_arm.get("sync")
    lines = []
    for arm, found in by_arm.items():
        spread = f"{len(found)} windows, {min(found):,.0f} to {max(found):,.0f}"
        ratio = f"   {np.median(found) / np.median(base):5.2f} x sync" if base else ""
        lines.append(f"{arm:18s} median {np.median(found):9,.0f} tok/s ({spread}){ratio}")
    return lines


@contextlib.contextmanager
def prepared(options: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder, in memory if there is one, with the model and the prompts; it is removed afterwards."""
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-one-gpu-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        if options.model is None:
            dtype = "bfloat16" if has_gpu() else "float32"
            words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(scratch / "model"), dtype]
            subprocess.run(words, cwd=REPOSITORY, check=True)
        lengths = Lengths(mean=options.length_mean, sigma=1.0, maximum=options.length_max, seed=0)
        write_prompts(scratch / "prompts.jsonl", metadata=lengths.as_metadata(), seed=0)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    rows: list[Row] = []
    try:
        with prepared(options) as scratch:
            print(HEAD, flush=True)
            for number, arm in enumerate(options.arms):
                for row in run_arm(arm, number, options, scratch):
                    rows.append(row)
                    print(line(row), flush=True)
                    keep(row, options.json)
    finally:
        print("", *ratios(rows), sep="\n", flush=True)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
