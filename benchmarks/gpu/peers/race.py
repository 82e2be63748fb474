"""A peer's own trainer on the GPUs and lengths of benchmarks.gpu.one_gpu: tokens trained per second, and how.

    python -m benchmarks.gpu.peers.race --peer slime=FOLDER trl=FOLDER --arms trl slime --json FILE
    python -m benchmarks.gpu.peers.race --peer trl=FOLDER --arms trl --rehearse     a scripted engine, a tiny model

FOLDER holds a peer's public packages, from benchmarks.gpu.peers.race_bring_up. Arms:

    slime    train.py, colocated on one GPU, or all of --split: SGLang and Megatron by turns, both in memory
    slime2   train_async.py with its fully-async rollout: one GPU trains, one generates, or as many as in --split
    trl      AsyncGRPOTrainer, its engine on the same GPU
    trl2     the same, its engine on the second GPU

Behind the warm-up (one step; as many as the bound more where sampling goes on) an arm is measured in --windows windows
of --seconds each; a window ends with a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang.options import PREFILL_DELAY
from asyncrl.engines.sglang.server import find_free_port
from benchmarks.gpu.arm import REPOSITORY, read_rows, visible_devices
from benchmarks.gpu.colocated import Memory
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.peers import slime_parts, slime_run
from benchmarks.gpu.peers.processes import Family
from benchmarks.gpu.peers.race_bring_up import ADAPTATIONS, VERSIONS
from benchmarks.gpu.peers.race_window import Step, measure, of_slime, windows
from benchmarks.gpu.peers.trained import OUT_VARIABLE
from benchmarks.gpu.peers.watching import environment, look, say
from benchmarks.gpu.peers.window import Look, Row
from benchmarks.gpu.plans import Plan, parse_arm
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, write_prompts

ARMS: Final = ("slime", "slime2", "trl", "trl2")
REHEARSAL: Final[Mapping[str, Any]] = {
    "shape": "tiny",
    "groups": 8,
    "group_size": 4,
    "length_mean": 24.0,
    "length_max": 96,
    "max_staleness": 2,
    "running": 16,
    "micro_batch_tokens": 1024,
    "seconds": 2.0,
    "windows": 2,
}
SERVER: Final = "sglang.launch_server"
SCRIPTED: Final = "benchmarks.gpu.peers.scripted_server"
ENGINE: Final[Mapping[str, Any]] = {
    **GPU_ARGUMENTS,
    **PREFILL_DELAY,
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs-decode": 512,
}
"""As benchmarks.gpu.one_gpu starts asyncrl's."""


def run_arm(arm: str, options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Return the rows of the arm's windows, and one with its error if not all are full."""
    out = (options.out / arm).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.jsonl"), out / slime_parts.ADDRESS):
        old.unlink(missing_ok=True)
    gpus, is_slime = gpus_of(arm, options), arm.startswith("slime")
    rule = {
        "warmup": 1 if arm == "slime" else 1 + options.max_staleness,
        "seconds": options.seconds,
        "number": options.windows,
    }
    looks: list[Look] = []
    steps: list[Step] = []
    memory = Memory(gpus) if has_gpu() else None
    began, ended = time.monotonic(), ""
    start = started_slime if is_slime else started_trl
    with start(arm, options, scratch, out) as family, looking(out, looks):
        while not ended:
            time.sleep(0.5)
            found = slimes_steps(out) if is_slime else read_rows(out / slime_parts.STEPS)
            if len(found) > len(steps):
                say(f"{arm}: step {len(found)} after {time.monotonic() - began:.0f} s", looks[-1][1:] if looks else "")
            steps = found
            if windows(steps, **rule)[0]:
                ended = "enough"
            elif family.exit_code is not None:
                ended = f"its trainer ended with exit code {family.exit_code}"
            elif time.monotonic() - began > options.limit:
                ended = f"{len(steps)} steps in {options.limit:.0f} s"
    full, spans = windows(steps, **rule)
    (out / "looks.json").write_text(json.dumps(looks))
    common = {
        "arm": arm,
        "gpus": gpus,
        "peer": VERSIONS["slime" if is_slime else "trl"],
        "adaptations": ADAPTATIONS["slime" if is_slime else "trl"],
        "arm_seconds": time.monotonic() - began,
        **{
            name: getattr(options, name)
            for name in ("split", "shape", "groups", "group_size", "length_mean", "length_max")
        },
        **{name: getattr(options, name) for name in ("max_staleness", "running", "micro_batch_tokens")},
        "warmup_steps": rule["warmup"],
        **machine(),
        "command": command("benchmarks.gpu.peers.race"),
    }
    rows: list[Row] = []
    for index, (first, last) in enumerate(spans):
        row = measure(steps[first : last + 1], looks, bound=options.max_staleness)
        used = {"gpu_memory": memory.between(row["began"], row["ended"])} if memory else {}
        rows.append({**common, "window": index, **row, **used})
    if memory:
        memory.close()
    if not full:
        log = (out / "run.log").read_text(errors="replace").splitlines()
        rows.append({**common, "error": ended, "log": log[-25:]})
    return rows


def gpus_of(arm: str, options: argparse.Namespace) -> int:
    split: Plan | None = options.plan if arm.startswith("slime") else None
    return split.gpus if split else 2 if arm.endswith("2") else 1


def slimes_steps(out: Path) -> list[Step]:
    return of_slime(read_rows(out / slime_parts.STEPS), read_rows(out / slime_parts.ROLLOUTS))


@contextlib.contextmanager
def looking(out: Path, looks: list[Look]) -> Iterator[None]:
    """Look at the engine whose address an arm writes down."""
    over, address = threading.Event(), out / slime_parts.ADDRESS

    def run() -> None:
        while not over.wait(1.0):
            if address.exists() and (url := address.read_text()):
                look(url, looks, over)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


@contextlib.contextmanager
def started_slime(arm: str, options: argparse.Namespace, scratch: Path, out: Path) -> Iterator[Family]:
    batch = options.groups * options.group_size
    two, gpus = arm == "slime2", gpus_of(arm, options)
    engines = options.plan.workers if options.plan else 1
    given = {
        **slime_run.options_of_model(options.shape, str(scratch / "model")),
        **slime_run.LAYERS,
        **slime_run.LEARNING,
        **slime_run.PARTS,
        **(slime_run.FULLY_ASYNC if two else slime_run.COLOCATED),
        "actor-num-nodes": 1,
        **({"rollout-num-gpus": engines} if two else {}),
        "actor-num-gpus-per-node": gpus - engines if two else gpus,
        "num-gpus-per-node": gpus,
        "prompt-data": scratch / "prompts.jsonl",
        "rollout-batch-size": options.groups,
        "n-samples-per-prompt": options.group_size,
        "global-batch-size": batch,
        "rollout-max-response-len": options.length_max,
        "max-tokens-per-gpu": options.micro_batch_tokens,
        # Of one engine. Synchronous, the whole batch runs at once, as in asyncrl's arm.
        "sglang-server-concurrency": options.running if two else -(-batch // gpus),
        "sglang-mem-fraction-static": options.engine_memory_2 if two else options.engine_memory,
        **{f"sglang-{name}": value for name, value in ENGINE.items()},
        **options.set,
    }
    words = ["benchmarks.gpu.peers.slime_run", "train_async" if two else "train", str(gpus)]
    more = {
        slime_parts.LENGTHS_VARIABLE: json.dumps(lengths(options).as_metadata()),
        "SLIME_HOST_IP": "127.0.0.1",
        "RAY_DEDUP_LOGS": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with Family(
        [sys.executable, "-m", *words, *slime_run.words(given)],
        environment=peer_environment("slime", options, out) | more,
        cwd=out,
        log=out / "run.log",
    ) as family:
        yield family


@contextlib.contextmanager
def started_trl(arm: str, options: argparse.Namespace, scratch: Path, out: Path) -> Iterator[Family]:
    url = f"http://127.0.0.1:{find_free_port()}"
    (out / slime_parts.ADDRESS).write_text(url)
    two = arm == "trl2"
    micro_batches = -(-options.groups * options.group_size * options.length_mean // options.micro_batch_tokens)
    job = {
        "model": str(scratch / "model"),
        "prompts": str(scratch / "prompts.jsonl"),
        "lengths": lengths(options).as_metadata(),
        "url": url,
        "config": {
            "num_generations": options.group_size,
            "max_completion_length": options.length_max,
            "gradient_accumulation_steps": int(micro_batches),
            "token_budget": options.micro_batch_tokens,
            "max_inflight_tasks": options.running,
            "max_staleness": options.max_staleness,
            "gradient_checkpointing": False,
            **({"use_cpu": True, "bf16": False} if options.rehearse else {}),
            **options.set,
        },
    }
    (out / "job.json").write_text(json.dumps(job))
    server = [sys.executable, "-m", SCRIPTED if options.rehearse else SERVER, "--host", "127.0.0.1"]
    engine = {
        "port": url.rpartition(":")[2],
        "model-path": scratch / "model",
        "dtype": "bfloat16",
        "mem-fraction-static": options.engine_memory_2 if two else options.engine_memory,
        "base-gpu-id": 1 if two else 0,
        "skip-server-warmup": True,
        **ENGINE,
    }
    both = peer_environment("trl", options, out)
    # transformers' Trainer would spread over all GPUs that it sees; the server sees both, to open its handles.
    environ = both | ({"CUDA_VISIBLE_DEVICES": visible_devices([0])} if has_gpu() else {})
    of_server = {
        **both,
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "NCCL_CUMEM_ENABLE": "0",
    }
    with (
        Family([*server, *slime_run.words(engine)], environment=of_server, cwd=REPOSITORY, log=out / "sglang.log"),
        Family(
            [sys.executable, "-m", "benchmarks.gpu.peers.trl_run", str(out / "job.json")],
            environment=environ,
            cwd=out,
            log=out / "run.log",
        ) as family,
    ):
        yield family


def peer_environment(peer: str, options: argparse.Namespace, out: Path) -> dict[str, str]:
    """The peer's packages come before the machine's."""
    paths = [str(options.peer[peer]), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
        OUT_VARIABLE: str(out),
    }


def lengths(options: argparse.Namespace) -> Lengths:
    return Lengths(mean=options.length_mean, sigma=1.0, maximum=options.length_max, seed=0)


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['arm']:8s}  FAILED: {row['error']}"
    return (
        f"{row['arm']:8s}  window {row['window']}  {row['tokens_per_second']:8,.0f} tok/s"
        f"  step {row['step_seconds']:5.1f} s  engine at zero {row['engine_at_zero']:5.1%}"
        f"  running {row['engine_running']:4.0f}  staleness {row['staleness_mean']:.2f}, {row['staleness_max']}"
        f"  past the bound {row['tokens_over_bound_share']:5.1%}  steps {row['steps']}"
        f"  memory {row.get('gpu_memory', {}).get('memory_max_gib', 0.0):.0f} GiB"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.peers.race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--peer", nargs="+", required=True, metavar="NAME=FOLDER", help="folders that race_bring_up made")
    add("--arms", nargs="+", choices=ARMS, required=True, metavar="ARM", help=" ".join(ARMS))
    add("--split", metavar="L+W", help="GPUs that train + engines, of slime (default: as above)")
    add("--shape", choices=SHAPES, default="0.6B", help="of the model (default 0.6B)")
    add("--model", type=Path, metavar="FOLDER", help="of that shape, from benchmarks.gpu.shapes (default: made)")
    add("--groups", type=int, default=64, help="groups per batch (default 64)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=float, default=500.0, help="tokens of an answer, before the cut (default 500)")
    add("--length-max", type=int, default=4096, help="where lengths are cut (default 4096)")
    add("--running", type=int, default=384, help="sequences that the engine may run, asynchronously (default 384)")
    add("--max-staleness", type=int, default=4, help="of trl, and what is past the bound (default 4)")
    add("--micro-batch-tokens", type=int, default=8192, help="of the trainer (default 8192)")
    add("--engine-memory", type=float, default=0.45, help="the engine's share of one GPU (default 0.45)")
    add("--engine-memory-2", type=float, default=0.85, help="of a GPU of its own (default 0.85)")
    add("--seconds", type=float, default=20.0, help="of a window (default 20)")
    add("--windows", type=int, default=3, help="of an arm (default 3)")
    add("--limit", type=float, default=300.0, help="seconds an arm may take with its start (default 300)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="further options of the peer")
    add("--out", type=Path, default=Path("runs/race"), help="logs (default runs/race)")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--rehearse", action="store_true", help="tiny: what a machine without GPUs can")
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    options.peer = {name: Path(folder).absolute() for name, folder in assignments(options.peer).items()}
    options.set = assignments(options.set)
    try:
        gpus = sum(map(int, options.split.split("+"))) if options.split else 0
        options.plan = parse_arm(f"async@{options.split}", gpus=gpus) if options.split else None
    except ValueError as error:
        parser.error(f"--split: {error}")
    for arm in options.arms:
        if arm.rstrip("2") not in options.peer:
            parser.error(f"--arms {arm}: --peer has no folder of {arm.rstrip('2')}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 when an arm failed."""
    options = arguments(given)
    failed = False
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="race-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        scratch = Path(name)
        if options.model is None:
            dtype = "bfloat16" if has_gpu() else "float32"
            words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(scratch / "model"), dtype]
            subprocess.run(words, cwd=REPOSITORY, check=True)
        else:
            (scratch / "model").symlink_to(options.model.absolute())
        write_prompts(scratch / "prompts.jsonl", metadata={}, seed=0)
        for arm in options.arms:
            say(f"{arm}: starts")
            for row in run_arm(arm, options, scratch):
                keep(row, options.json)
                say(line(row))
                failed = failed or "error" in row
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
