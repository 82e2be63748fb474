"""Compare synchronous, one-step-off and asynchronous training on the same GPUs: tokens trained per second.

    python -m benchmarks.gpu.modes --gpus 4 --shape 0.6B --splits 2+2 1+3 --json docs/results/gpu/modes.jsonl
    python -m benchmarks.gpu.modes --arms async@1+1 sync@1+1 --gpus 2      these arms, in this order
    python -m benchmarks.gpu.modes --arms async@1+1 async@1+7 --gpus 8     a split may leave GPUs without work
    python -m benchmarks.gpu.modes --rehearse                              tiny, on a CPU: shows that all of it works

The learner, the rollout workers, nats-server and SGLang are real. The weights are random, and the answers' lengths
depend on (seed, group, index), so each arm has the same lengths. A split L+W is L GPUs for the learner's data-parallel
ranks and W engines; colocated, every GPU has both. SGLang servers start once and serve every arm.

Arms: async (weights are loaded in flight, and the learner waits for late answers), async_drain (engines drain before
they load), one_step_off, sync, sync_colocated, and async_drop (async, but groups that get too old are dropped). The
first split runs all arms, the most informative first. If the sweep ends early, the JSON file has the rows so far. An
arm is measured from the end of its last warm-up step (async: once the window was filled; 2 steps of one_step_off, 1 of
sync) until --window seconds and two steps are over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.arm import REPOSITORY
from benchmarks.gpu.estimate import SPEEDS, arm_seconds, speeds
from benchmarks.gpu.fleet import Fleet, FleetError, has_gpu
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.plans import KINDS, Plan, parse_arm, plans
from benchmarks.gpu.rows import command, keep
from benchmarks.gpu.shapes import SHAPES, write_prompts
from benchmarks.gpu.sweep import Scene, Sweep
from benchmarks.gpu.window import Row, broken_promises, ratios

_SHARED_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 8 * 2**30

REHEARSAL: Final[dict[str, Any]] = {
    "gpus": 2,
    "shape": "tiny",
    "groups": 8,
    "group_size": 4,
    "length_mean": 24.0,
    "length_max": 96,
    "max_staleness": 2,
    "running": 32,
    "window": 5.0,
    "limit": 90.0,
    "budget": 900.0,
    "set": ["learner.threads=1"],
}

HEAD: Final = (
    "arm             split     tok/s  learner idle  overhead  engine idle  running  sampled tok/s  staleness mean  max"
    "  dropped  pause p50   p99 ms  publish s  sampled length    p99  trained    p99  steps  step s"
)


def line(row: Row) -> str:
    start = f"{row['arm']:14s}  {row['split']:>5s}"
    if "error" in row:
        return f"{start}  FAILED: {row['error'].splitlines()[0]}"
    sampled, trained = row["lengths_generated"], row["lengths_trained"]
    return (
        f"{start}  {row['tokens_per_second']:8,.0f}  {row['learner_idle']:12.1%}  {row['learner_overhead']:8.1%}"
        f"  {row['engine_idle']:11.1%}  {row['engine_running']:7.0f}  {row['generated_tokens_per_second']:13,.0f}"
        f"  {row['staleness_mean']:14.2f}  {row['staleness_max']:3d}  {row['dropped_groups']:7d}"
        f"  {1e3 * row['pause_p50']:9.0f}  {1e3 * row['pause_p99']:7.0f}  {row['publish_seconds']:9.2f}"
        f"  {sampled['mean']:14,.0f}  {sampled['p99']:5,.0f}  {trained['mean']:7,.0f}  {trained['p99']:5,.0f}"
        f"  {row['steps']:5d}  {row['step_seconds']:6.2f}"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=4, help="learner and engines together (default 4)")
    add("--shape", choices=SHAPES, default="0.6B", help="of the model (default 0.6B)")
    add("--model", type=Path, metavar="FOLDER", help="of that shape, from benchmarks.gpu.shapes (default: made)")
    add("--splits", nargs="+", default=[], metavar="L+W", help="learner GPUs + engines, the likely best one first")
    add("--modes", nargs="+", choices=KINDS, default=list(KINDS), metavar="ARM", help=" ".join(KINDS))
    add(
        "--arms", nargs="+", default=[], metavar="ARM@L+W", help="these and no others, such as async@1+3 sync_colocated"
    )
    add("--groups", type=int, default=64, help="groups per batch (default 64)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=float, default=1000.0, help="tokens of an answer, before the cut (default 1000)")
    add("--length-sigma", type=float, default=1.0, help="of the logarithm (default 1.0)")
    add("--length-max", type=int, default=8192, help="where lengths are cut (default 8192)")
    add("--max-staleness", type=int, default=4, help="of async (default 4)")
    add("--running", type=int, default=256, help="sequences an engine may run in async arms (default 256)")
    add("--window", type=float, default=20.0, help="seconds measured of an arm (default 20)")
    add("--warmup", type=int, default=0, help="steps of warm-up of every arm (default: see above)")
    add("--max-steps", type=int, default=60, help="of an arm behind its warm-up (default 60)")
    add("--limit", type=float, default=150.0, help="seconds an arm may take with its start (default 150)")
    add("--budget", type=float, default=1e9, help="seconds for all arms, counted once the engines are up")
    add(
        "--channel", choices=("nccl", "files"), default="nccl", help="for weights of arms that are apart (default nccl)"
    )
    add(
        "--engine-memory",
        type=float,
        default=0.0,
        help="share of the GPU an engine takes (default 0.85; colocated 0.4)",
    )
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang servers")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file, for every arm")
    add("--prestart", action=argparse.BooleanOptionalAction, help="start an arm's learner while the one before runs")
    add("--seed", type=int, default=0, help="of lengths and data")
    add("--out", type=Path, default=Path("runs/modes"), help="logs, metrics and timelines (default runs/modes)")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--estimate", action="store_true", help="print what to expect and how long it takes, start nothing")
    add(
        "--rehearse", action="store_true", help="tiny model, short answers, one engine: what a machine without GPUs can"
    )
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    try:
        options.plans = (
            [parse_arm(text, gpus=options.gpus) for text in options.arms]
            if options.arms
            else plans(options.modes, splits=options.splits, gpus=options.gpus)
        )
        options.set, options.engine = assignments(options.set), assignments(options.engine)
    except ValueError as error:
        parser.error(str(error))
    if options.estimate and options.shape not in SPEEDS:
        parser.error(f"--estimate: no speeds of {options.shape} were measured, only of {', '.join(SPEEDS)}")
    if options.prestart is None:
        options.prestart = options.shape in ("tiny", "0.6B")  # a GPU must have room for two learners
    return options


def assignments(items: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE items with TOML values; a bare word is a string. Raises ValueError."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not KEY=VALUE")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def scene(options: argparse.Namespace, scratch: Path) -> Scene:
    """Make the scene, including its model and prompts."""
    lengths = Lengths(
        mean=options.length_mean, sigma=options.length_sigma, maximum=options.length_max, seed=options.seed
    )
    dtype = "bfloat16" if has_gpu() else "float32"
    if (model := options.model) is None:
        model = scratch / "model"
        # In a separate process, so that its GPU memory is free when it ends.
        words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(model), dtype]
        subprocess.run(words, cwd=REPOSITORY, check=True)
    data = write_prompts(scratch / "prompts.jsonl", metadata=lengths.as_metadata(), seed=options.seed)
    return Scene(
        shape=options.shape,
        model=model,
        data=data,
        dtype=dtype,
        lengths=lengths,
        gpus=options.gpus,
        groups_per_batch=options.groups,
        group_size=options.group_size,
        max_staleness=options.max_staleness,
        running=options.running,
        channel=options.channel,
        window_seconds=options.window,
        warmup=options.warmup,
        max_steps=options.max_steps,
        limit_seconds=options.limit,
        seed=options.seed,
        settings=options.set,
        out=options.out,
        scratch=scratch,
        command=command("benchmarks.gpu.modes"),
    )


def estimate(options: argparse.Namespace) -> None:
    """Print the estimated result and duration of each arm on H200s."""
    total = 0.0
    for plan, speed, step_seconds in speeds(
        options.plans,
        shape=options.shape,
        groups_per_batch=options.groups,
        group_size=options.group_size,
        max_staleness=options.max_staleness,
        running=options.running,
        length_mean=options.length_mean,
        length_max=options.length_max,
        seed=options.seed,
    ):
        warmup = options.warmup or plan.warmup(options.max_staleness)
        seconds = arm_seconds(step_seconds=step_seconds, warmup=warmup, window_seconds=options.window)
        total += seconds
        print(
            f"{plan.arm:14s}  {plan.split:>5s}  {speed:8,.0f} tok/s  step {step_seconds:5.1f} s"
            f"  warm-up {warmup * step_seconds:4.0f} s  arm {seconds:4.0f} s",
            flush=True,
        )
    print(f"{total:.0f} s, and the start of the engines (35 to 95 s)")


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return SGLang's options, with room for the sequences of the fullest arm, decoded with CUDA graphs."""
    if not has_gpu():
        return dict(options.engine)
    sequences = max(
        plan.running(options.groups, options.group_size, of_async=options.running) for plan in options.plans
    )
    sequences = max(options.running, sequences) + options.group_size  # the last group may exceed the limit
    is_shared = any(plan.is_colocated for plan in options.plans)
    return {
        "mem-fraction-static": options.engine_memory or (0.4 if is_shared else 0.85),
        "cuda-graph-max-bs-decode": min(512, sequences),
        **options.engine,
    }


def engine_gpus(arms: Sequence[Plan]) -> list[int]:
    """Return the GPUs with an engine in any arm: the last ones, or all if an arm is colocated."""
    if not has_gpu():
        return [0]
    return sorted({gpu for plan in arms for gpu in plan.engine_gpus})


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if the staleness bound was exceeded, an arm failed, or the servers do not start."""
    options = arguments(given)
    if options.estimate:
        estimate(options)
        return 0
    room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > _ROOM_BYTES
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-modes-", dir=_SHARED_MEMORY if room else None))
    rows: list[Row] = []
    try:
        setting = scene(options, scratch)
        gpus = engine_gpus(options.plans)
        with Fleet(
            setting.model,
            gpus=gpus,
            dtype=setting.dtype,
            log_dir=options.out / "engines",
            server_arguments=engine_arguments(options),
        ) as fleet:
            print(HEAD, flush=True)
            for row in Sweep(setting, fleet, gpus=gpus, is_prestarting=options.prestart).run(
                options.plans, budget_seconds=options.budget
            ):
                rows.append(row)
                print(line(row), flush=True)
                keep(row, options.json)
                if len(rows) == 1 and "error" in row:
                    break  # the other arms would fail in the same way
    except (FleetError, subprocess.CalledProcessError) as error:
        print(f"modes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        print("", HEAD, *map(line, rows), "", *ratios(rows), sep="\n", flush=True)
        shutil.rmtree(scratch, ignore_errors=True)
    problems = list(broken_promises(rows))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems or any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
