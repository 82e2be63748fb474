"""Compare learning of a large mixture on stale and fresh samples: SmolLM2-135M grown to many experts, on mixed sums.

    python -m benchmarks.gpu.grown --dense FOLDER --arms async sync --json docs/results/gpu/grown.jsonl   1 + 1 GPUs
    python -m benchmarks.gpu.grown --dense FOLDER --side-by-side        each arm on a GPU of its own, at the same time
    python -m benchmarks.gpu.grown --rehearse                           a grown tiny model on a CPU

Each arm is one `asyncrl run` from the same weights with the same prompts, seed and number of samples; async has the
default bound. Adapters on attention are trained and published. SGLang reports the experts of a Mixtral, to be replayed,
from 0.5.22 on; before, two columns of trainer - engine stay empty. The held-out problems (reasoning.py) are answered by
the first version and by the last. grow.py makes the model; benchmarks.old_tokens has the dense model's numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.arm import override_words, read_rows, started, tail, visible_devices
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.reasoning import TASKS, write_exam, write_prompts
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.window import Row, measure

RUN_FILE: Final = "benchmarks/gpu/learning.toml"
ARMS: Final = ("async", "sync")
REHEARSAL: Final[Mapping[str, Any]] = {
    "experts": 4,
    "chosen": 2,
    "steps": 3,
    "groups": 2,
    "group_size": 4,
    "held_out": 4,
    "answers": 2,
    "set": [
        "learner.threads=1",
        "engine.kind='inprocess'",
        "engine.device='cpu'",
        "learner.device='cpu'",
        "rollout.max_new_tokens=16",
        "data.max_prompt_tokens=1024",
        "learner.lora.publish='merged'",
        "weights.channel='files'",
    ],
}
MODULES: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
HEAD: Final = (
    "arm    seed  steps  samples  held out first  last  error  reward first  last  staleness mean  max"
    "  trainer - engine: replayed       own     fresh    tok/s  step s  memory GiB  seconds"
)
_SERVER: Final[Mapping[str, Any]] = {
    **GPU_ARGUMENTS,
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs": 256,
    "context-length": 2048,
    "max-total-tokens": 400_000,
}


def line(row: Row) -> str:
    start = f"{row['arm']:5s}  {row['seed']:4d}  {row['steps']:5d}  {row['steps'] * row['batch']:7d}"
    if "tokens_per_second" not in row:
        return f"{start}  FAILED: {row.get('error', 'too few steps to measure')}"
    first, last = (_at(row["held_out"], step) for step in (0, row["steps"]))
    return (
        f"{start}  {first['mean']:14.3f}  {last['mean']:4.2f}  {(last['high'] - last['low']) / 4:5.3f}"
        f"  {np.mean(row['reward'][:3]):12.3f}  {np.mean(row['reward'][-3:]):4.2f}  {row['staleness_mean']:14.2f}"
        f"  {row['staleness_max']:3d}  {_mean(row['replayed']):>26s}  {_mean(row['own']):>8s}"
        f"  {_mean(row['fresh']):>8s}  {row['tokens_per_second']:7,.0f}  {row['step_seconds']:6.2f}"
        f"  {row['memory_gib']:10.1f}  {row['seconds']:7.1f}" + (f"  {row['error']}" if "error" in row else "")
    )


def _at(found: Sequence[Row], step: int) -> Row:
    """Return the evaluation of a step; of a run that was ended before it, not a number."""
    return next((one for one in found if one["step"] == step), dict.fromkeys(("mean", "low", "high"), float("nan")))


def _mean(found: Sequence[float | None]) -> str:
    """Return the mean of what is there. Without routing replay a row has no numbers of it."""
    there = [one for one in found if one is not None]
    return f"{np.mean(there):.5f}" if there else "-"


def overrides(arm: str, seed: int, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    batch = options.groups * options.group_size
    exam = {"name": "held_out", "path": str(scratch / "exam.jsonl"), "chat_template": True}
    exam |= {"samples": options.answers, "tag_key": "task"}
    places = {} if options.side_by_side or not has_gpu() else {"learner.gpus": [0], "rollout.gpus": [1]}
    return {
        "run.name": f"{arm}-{seed}",
        "run.directory": scratch / "runs",
        "run.mode": arm,
        "run.seed": seed,
        "run.steps": options.steps,
        "model.path": options.model,
        "model.dtype": "bfloat16" if has_gpu() else "float32",
        "data.path": scratch / "prompts.jsonl",
        "rollout.group_size": options.group_size,
        "rollout.max_running": batch + (batch // 2 if arm == "async" else 0),
        "learner.groups_per_batch": options.groups,
        "learner.learning_rate": options.learning_rate,
        "learner.micro_batch_tokens": 8192,
        "learner.lora.rank": 32,
        "learner.lora.modules": MODULES,
        "learner.lora.publish": "adapter",
        "weights.channel": "files",
        "weights.directory": scratch / f"weights-{arm}-{seed}",
        "evaluation.datasets": [exam],
        "evaluation.share": 1.0,
        "bus.max_log_bytes": 2**34,
        "bus.max_message_bytes": 2**25,
        **({"engine.options.server_arguments": {**_SERVER, **options.engine}} if has_gpu() else {}),
        **places,
        **options.set,
    }


def run(arm: str, seed: int, gpu: int | None, options: argparse.Namespace, scratch: Path) -> Row:
    """Return the row of an arm that runs until its end, or until the limit.  gpu: the only one that it sees"""
    words = ["-m", "asyncrl", "run", RUN_FILE, *override_words(overrides(arm, seed, options, scratch))]
    folder = scratch / "runs" / f"{arm}-{seed}"
    output = (options.out or scratch) / f"{arm}-{seed}.out"
    sees = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_devices([gpu])}
    began, problem = time.monotonic(), ""
    with started(words, output, environment=sees) as process:
        while process.poll() is None and not problem:
            time.sleep(0.5)
            if time.monotonic() - began > options.limit:
                problem = f"not over in {options.limit:.0f} s"
        if process.poll():
            problem = f"the run ended with exit code {process.returncode}"
    rows = read_rows(folder / "metrics.jsonl")
    about: Row = {
        "arm": arm,
        "seed": seed,
        "experts": options.experts,
        "batch": options.groups * options.group_size,
        "seconds": time.monotonic() - began,
        **({"error": problem} if problem else {}),
    }
    if problem:
        print(tail(output), flush=True)
    if options.out is not None:
        with contextlib.suppress(OSError):
            shutil.copytree(folder / "logs", options.out / f"{arm}-{seed}", dirs_exist_ok=True)
            shutil.copyfile(folder / "metrics.jsonl", options.out / f"{arm}-{seed}.jsonl")
    return about | numbers(rows)


def numbers(rows: Sequence[Row]) -> Row:
    """Return the numbers of a run's steps and evaluations."""
    steps = [row for row in rows if "learner/step_seconds" in row]
    found: Row = {
        "steps": len(steps),
        "held_out": [scores(row) for row in rows if "evaluation/complete" in row],
        "reward": [row["reward/mean"] for row in steps],
        "replayed": [row.get("mismatch/routing_replayed") for row in steps],
        "own": [row.get("mismatch/routing_own") for row in steps],
        "fresh": [row.get("mismatch/fresh_mean") for row in steps],
        "memory_gib": max((row.get("learner/memory_bytes") or 0 for row in steps), default=0) / 2**30,
    }
    warmup = min(5, len(steps) - 1)
    return found | (measure(steps, [], warmup=warmup) | {"steps": len(steps)} if warmup > 0 else {})


def scores(row: Row) -> Row:
    """Return an evaluation: mean reward of all answers, with its 95 % interval."""
    name = next(name for name in row if name.startswith("evaluation/held_out/mean@") and name.count("/") == 2)
    low, high = row.get(f"{name}/low", float("nan")), row.get(f"{name}/high", float("nan"))
    of_kind = {key.partition("[")[2].partition("]")[0]: row[key] for key in row if "[" in key and "/mean@" in key}
    return {"step": row["step"], "mean": row[name], "low": low, "high": high, "of": of_kind}


def made(options: argparse.Namespace, scratch: Path) -> Path:
    """Return the grown model: the given one, or one that is made from a dense folder (a tiny one in a rehearsal)."""
    import torch

    from benchmarks.gpu.grow import grow

    dense = options.dense
    if options.model is not None:
        return Path(options.model)
    if dense is None:
        from asyncrl.data.tiny_model import make_tiny_model

        letters = "".join(sorted({*"".join(map(chr, range(32, 127))), "\n"}))
        dense = make_tiny_model(scratch / "dense", architecture="llama", characters=letters, max_positions=2048)
    began = time.monotonic()
    settings = {"experts": options.experts, "chosen": options.chosen, "noise": options.noise}
    dtype = torch.bfloat16 if has_gpu() else None  # a float32 model is twice as large, for nothing there
    folder = grow(dense, scratch / "model", **settings, dtype=dtype)
    print(f"grown to {options.experts} experts in {time.monotonic() - began:.0f} s", flush=True)
    return folder


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.grown",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dense", type=Path, metavar="FOLDER", help="the Llama to grow, its weights in one file")
    add("--model", type=Path, metavar="FOLDER", help="one that benchmarks.gpu.grow has made, instead of --dense")
    add("--experts", type=int, default=128, help="(default 128)")
    add("--chosen", type=int, default=8, help="experts of a token (default 8)")
    add("--noise", type=float, default=0.01, help="between experts, see grow.py (default .01)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: both)")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--side-by-side", action="store_true", help="all arms at once, each on one GPU, its learner beside its engine")
    add("--tasks", type=Path, default=TASKS / "mixed", help="folder that reasoning.py wrote (default: mixed)")
    add("--steps", type=int, default=40, help="optimizer steps of an arm (default 40)")
    add("--groups", type=int, default=32, help="groups per batch (default 32)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--held-out", type=int, default=256, help="problems of an evaluation (default 256)")
    add("--answers", type=int, default=4, help="to each of them (default 4)")
    add("--learning-rate", type=float, default=1e-4, help="of the adapters (default 1e-4)")
    add("--limit", type=float, default=240.0, help="seconds of an arm (default 240)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang servers")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file, for every arm")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--out", type=Path, metavar="FOLDER", help="logs of the arms are copied there")
    add("--rehearse", action="store_true", help="a grown tiny model, on a CPU")
    options = parser.parse_args(given)
    settings = options.set
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
        settings = [*REHEARSAL["set"], *settings]
    elif options.dense is None and options.model is None:
        parser.error("name --dense or --model")
    options.set, options.engine = assignments(settings), assignments(options.engine)
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-grown-", dir=memory if os.access(memory, os.W_OK) else None))
    jobs = [(arm, seed) for seed in options.seeds for arm in options.arms]
    is_whole = True
    try:
        options.model = made(options, scratch)
        write_prompts(scratch / "prompts.jsonl", tasks=options.tasks)
        write_exam(scratch / "exam.jsonl", tasks=options.tasks, problems=options.held_out)
        print(HEAD, flush=True)
        with ThreadPoolExecutor(len(jobs) if options.side_by_side else 1) as pool:
            gpus = range(len(jobs)) if options.side_by_side and has_gpu() else [None] * len(jobs)
            for row in pool.map(lambda job, gpu: run(job[0], job[1], gpu, options, scratch), jobs, gpus):
                row |= {"command": command("benchmarks.gpu.grown", given), **machine()}
                print(line(row), flush=True)
                keep(row, options.json)
                is_whole = is_whole and "error" not in row
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
