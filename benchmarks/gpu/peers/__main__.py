"""asyncrl and AReaL on the same GPUs: some train, some generate. Tokens trained per second, and how.

    python -m benchmarks.gpu.peers.bring_up PEER           where a package registry is; PEER then goes to the GPU host
    python -m benchmarks.gpu.peers --peer PEER --json FILE                one of two GPUs trains
    python -m benchmarks.gpu.peers --peer PEER --json FILE --split 2+6    two of eight
    python -m benchmarks.gpu.peers --peer PEER --arms areal --rehearse    without GPUs: a scripted engine, a tiny model

Both get the same prompts and answers of the same lengths, 64 groups of 8 a step, micro-batches of as many tokens, the
same bound, and a reward that costs nothing. AReaL's own trainer runs, with what is listed in its row as adaptations;
asyncrl's arm is async of benchmarks.gpu.modes. Of several engines of AReaL the first is watched. Behind the warm-up an
arm is measured until --window seconds and 10 steps are over, or its --limit; what was measured until then counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang.options import PREFILL_DELAY
from asyncrl.engines.sglang.server import find_free_port
from benchmarks.gpu.arm import REPOSITORY, read_rows
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.peers.bring_up import ADAPTATIONS, VERSION
from benchmarks.gpu.peers.processes import Family
from benchmarks.gpu.peers.trained import FILE, OUT_VARIABLE
from benchmarks.gpu.peers.watching import environment, look, say
from benchmarks.gpu.peers.window import Look, Row, measure_areal, ours
from benchmarks.gpu.plans import parse_arm
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, write_prompts
from benchmarks.gpu.window import Rule

ARMS: Final = ("areal", "asyncrl")
HERE: Final = Path(__file__).parent
_FLEET_SECONDS: Final = 150.0
"""What starting SGLang may add to the limit of asyncrl's arm, which does not count it."""

SERVER_OPTIONS: Final = {
    "grammar_backend": "none",
    "skip_server_warmup": True,
    **{name.replace("-", "_"): value for name, value in PREFILL_DELAY.items()},
}
"""AReaL's server gets what ours has by default (benchmarks.gpu.arrivals)."""


def run_areal(options: argparse.Namespace, scratch: Path) -> Row:
    out = (options.out / "areal").absolute()
    shutil.rmtree(out, ignore_errors=True)
    (out / "work" / "areal" / "name_resolve").mkdir(parents=True)
    dtype = "float32" if options.rehearse else "bfloat16"
    model = scratch / "model"
    words = [sys.executable, "-m", "benchmarks.gpu.shapes", options.shape, str(model), dtype]
    subprocess.run(words, cwd=REPOSITORY, check=True)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(40_960, config["max_position_embeddings"])  # it pads beyond the tiny one's
    (model / "config.json").write_text(json.dumps(config))
    job = {
        "prompts": str(write_prompts(scratch / "prompts.jsonl", metadata={}, seed=options.seed)),
        "lengths": lengths(options).as_metadata(),
        "ports": [find_free_port() for _ in range(options.plan.workers)],
        "learners": options.plan.learners,
        "server": "benchmarks.gpu.peers.scripted_server" if options.rehearse else "sglang.launch_server",
        "server_options": SERVER_OPTIONS,
        "server_path": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    (out / "job.json").write_text(json.dumps(job))
    overrides = [*areal_overrides(options), f"actor.path={model}", f"actor.dtype={dtype}", *options.areal]
    script = ["benchmarks.gpu.peers.areal_run", str(out / "job.json"), "--config", str(HERE / "areal.yaml")]
    rule = Rule(warmup=options.warmup, seconds=options.window, min_steps=options.steps)
    began = time.monotonic()
    ended = "limit"
    looks: list[Look] = []
    with Family(
        [sys.executable, "-m", *script, *overrides],
        environment=areal_environment(options.peer.absolute(), out),
        cwd=out / "work",
        log=out / "run.log",
    ) as family:
        over = threading.Event()
        looking = threading.Thread(target=look, args=(f"http://127.0.0.1:{job['ports'][0]}", looks, over), daemon=True)
        looking.start()
        told = 0
        while time.monotonic() - began < options.limit:
            time.sleep(0.5)
            steps = read_rows(out / "steps.jsonl")
            if len(steps) > told:
                told = len(steps)
                say(f"areal: step {told} after {time.monotonic() - began:.0f} s, {looks[-1][1:] if looks else None}")
            if len(steps) > options.warmup and rule.is_enough(steps):
                ended = "enough"
                break
            if family.exit_code is not None:
                ended = f"exit code {family.exit_code}"
                break
        over.set()
        looking.join(5.0)
    (out / "looks.json").write_text(json.dumps(looks))
    head = {
        "arm": "areal",
        "ended": ended,
        "arm_seconds": time.monotonic() - began,
        "adaptations": ADAPTATIONS,
        "overrides": overrides,
    }
    head["versions"] = {**machine()["versions"], "areal": VERSION, **versions("transformers", "numpy", "aiohttp")}
    try:
        measured = measure_areal(
            read_rows(out / "steps.jsonl"),
            read_rows(out / FILE),
            looks,
            warmup=options.warmup,
            bound=options.max_staleness,
        )
    except (ValueError, KeyError) as error:
        log = (out / "run.log").read_text(errors="replace").splitlines()
        return head | {"error": f"{type(error).__name__}: {error}; {ended}", "log": log[-25:]}
    return head | measured


def areal_overrides(options: argparse.Namespace) -> list[str]:
    made = [
        f"gconfig.n_samples={options.group_size}",
        f"gconfig.max_new_tokens={options.length_max}",
        f"train_dataset.batch_size={options.groups}",
        f"rollout.max_head_offpolicyness={options.max_staleness}",
        f"rollout.max_concurrent_rollouts={options.groups_at_once * options.plan.workers}",
        f"cluster.n_gpus_per_node={options.plan.gpus}",
        f"actor.backend=archon:d{options.plan.learners}p1t1",
        f"rollout.backend=sglang:d{options.plan.workers}p1t1",
        f"actor.mb_spec.max_tokens_per_mb={options.micro_batch_tokens}",
        f"sglang.mem_fraction_static={options.engine_memory}",
    ]
    if options.rehearse:
        made += ["actor.weight_update_mode=disk", "actor.archon.enable_compile=false", "+actor.archon.attn_type=sdpa"]
        spec = '{task_type: worker, port_count: 2, gpu: 0, cpu: 1, mem: 4, cmd: "python3 -m areal.infra.rpc.rpc_server"'
        made.append(f"actor.scheduling_spec=[{spec}, env_vars: {{}}}}]")
    return made


def areal_environment(peer: Path, out: Path) -> dict[str, str]:
    behind = os.environ.get("PYTHONPATH", "")
    paths = [str(REPOSITORY), str(peer / "stand_in"), str(peer / "site"), *filter(None, [behind])]
    return {
        **environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        # Its workers are started as python3.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        OUT_VARIABLE: str(out),
    }


def run_ours(options: argparse.Namespace) -> Row:
    out = (options.out / "asyncrl").absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    given = {
        "--gpus": options.plan.gpus,
        "--shape": options.shape,
        "--arms": f"async@{options.split}",
        "--groups": options.groups,
        "--group-size": options.group_size,
        "--length-mean": options.length_mean,
        "--length-max": options.length_max,
        "--max-staleness": options.max_staleness,
        "--running": options.running,
        "--warmup": options.warmup,
        "--window": options.window,
        "--limit": options.limit,
        "--engine-memory": options.engine_memory,
        "--set": f"learner.micro_batch_tokens={options.micro_batch_tokens}",
        "--seed": options.seed,
        "--out": out / "runs",
        "--json": out / "row.jsonl",
    }
    words = [str(word) for pair in given.items() for word in pair]
    words += ["--no-prestart", *(["--rehearse"] if options.rehearse else [])]
    began = time.monotonic()
    with Family(
        [sys.executable, "-m", "benchmarks.gpu.modes", *words],
        environment=environment(),
        cwd=REPOSITORY,
        log=out / "run.log",
    ) as family:
        told = 0
        while family.exit_code is None and time.monotonic() - began < options.limit + _FLEET_SECONDS:
            time.sleep(0.5)
            steps = sum(len(read_rows(path)) for path in (out / "runs").glob("*/metrics.jsonl"))
            if steps > told:
                told = steps
                say(f"asyncrl: step {told} after {time.monotonic() - began:.0f} s")
    head = {"arm": "asyncrl", "arm_seconds": time.monotonic() - began, "modes": " ".join(words), "adaptations": []}
    rows = read_rows(out / "row.jsonl")
    if not rows or "error" in rows[-1]:
        log = (out / "run.log").read_text(errors="replace").splitlines()
        return head | {"error": rows[-1]["error"] if rows else "no row", "log": log[-25:]}
    row = rows[-1]
    samples: list[Row] = []
    steps_of: list[Row] = []
    for line in read_rows(out / "runs" / row["name"] / "timeline.jsonl"):
        if isinstance(line.get("step"), dict):  # the run's own lines there have its number
            steps_of.append(line["step"])
        elif "engines" in line:
            samples.append(line)
    kept = {name: value for name, value in row.items() if name not in ("arm", "arm_seconds", "command", "versions")}
    more = ours(row, samples, steps_of, bound=options.max_staleness)
    names = {**row["versions"], **versions("asyncrl", "transformers", "nats-py")}
    return head | kept | more | {"versions": names}


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lengths(options: argparse.Namespace) -> Lengths:
    return Lengths(mean=options.length_mean, sigma=1.0, maximum=options.length_max, seed=options.seed)


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['arm']:8s}  FAILED: {row['error']}"
    return (
        f"{row['arm']:8s}  {row['tokens_per_second']:8,.0f} tok/s  step {row['step_seconds']:5.1f} s"
        f"  learner busy {row['learner_busy']:5.1%}  engine at zero {row['engine_at_zero']:5.1%}"
        f"  running {row['engine_running']:4.0f}  staleness {row['staleness_mean']:.2f}, {row['staleness_max']}"
        f"  past the bound {row['tokens_over_bound_share']:5.1%}  dropped {row.get('dropped_groups', 'not counted')}"
        f"  steps {row['steps']} in {row['window_seconds']:.0f} s"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", type=Path, default=Path("peer"), help="folder that bring_up made (default peer)")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=" ".join(ARMS))
    add("--split", default="1+1", metavar="L+W", help="GPUs that train + engines (default 1+1)")
    add("--shape", choices=SHAPES, default="0.6B", help="of the model (default 0.6B)")
    add("--groups", type=int, default=64, help="groups per batch (default 64)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=float, default=500.0, help="tokens of an answer, before the cut (default 500)")
    add("--length-max", type=int, default=4096, help="where lengths are cut (default 4096)")
    add("--max-staleness", type=int, default=4, help="the bound (default 4)")
    add("--running", type=int, default=384, help="sequences that an engine of asyncrl runs (default 384)")
    add("--groups-at-once", type=int, default=128, help="AReaL's max_concurrent_rollouts an engine (default 128)")
    add("--micro-batch-tokens", type=int, default=16_384, help="of both learners (default 16384)")
    add("--engine-memory", type=float, default=0.85, help="share of its GPU (default 0.85)")
    add("--warmup", type=int, default=5, help="steps not measured (default 5)")
    add("--window", type=float, default=110.0, help="seconds measured (default 110)")
    add("--steps", type=int, default=10, help="least number of steps measured of AReaL's arm (default 10)")
    add("--limit", type=float, default=400.0, help="seconds an arm may take; asyncrl's without its engine's start")
    add("--areal", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of AReaL")
    add("--seed", type=int, default=0, help="of lengths and prompts")
    add("--out", type=Path, default=Path("runs/peers"), help="logs (default runs/peers)")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--rehearse", action="store_true", help="tiny: what a machine without GPUs can")
    options = parser.parse_args(given)
    if options.rehearse:
        tiny: dict[str, Any] = {"shape": "tiny", "groups": 8, "group_size": 4, "length_mean": 24.0, "length_max": 96}
        tiny |= {"max_staleness": 2, "running": 32, "groups_at_once": 16, "warmup": 2, "window": 5.0, "steps": 2}
        parser.set_defaults(**tiny)
        options = parser.parse_args(given)
    try:
        options.plan = parse_arm(f"async@{options.split}", gpus=sum(map(int, options.split.split("+"))))
    except ValueError as error:
        parser.error(f"--split: {error}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 when an arm failed."""
    options = arguments(given)
    rows: list[Row] = []
    for arm in options.arms:
        say(f"{arm}: starts")
        if arm == "areal":
            shared = Path("/dev/shm")
            with tempfile.TemporaryDirectory(
                prefix="peers-", dir=shared if os.access(shared, os.W_OK) else None
            ) as name:
                row = run_areal(options, Path(name))
        else:
            row = run_ours(options)
        row = {
            **row,
            "gpus": options.plan.gpus,
            "split": options.split,
            "model": options.shape,
            "groups_per_batch": options.groups,
            "group_size": options.group_size,
            "length_mean_drawn": options.length_mean,
            "length_max": options.length_max,
            "max_staleness": options.max_staleness,
            "micro_batch_tokens": options.micro_batch_tokens,
            "warmup_steps": options.warmup,
            "seed": options.seed,
            "device": machine()["device"],
            "command": command("benchmarks.gpu.peers", given),
        }
        keep(row, options.json)
        rows.append(row)
        say(line(row))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
