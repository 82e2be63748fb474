"""Compare a remote rollout worker with one next to the learner: trained tokens per second, arm by arm.

    python -m benchmarks.far                      every arm; some minutes
    python -m benchmarks.far --arms near far      only these arms

Each arm is a run of real processes in two network namespaces (far_link.py). One side has the learner and a nats-server
with the configuration of bin/nats-config; the other side has the worker. Each side has its own folder, and they share
only TCP connections that the worker opened. Weights go through the object store. Engine and trainer are simulated. The
loss of an arm is relative to the arm "near", whose worker is on the learner's side. After the measured steps the run
continues for a window of further steps, because at its very end no prompts are left and all parts wait for the last
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.bus.nats_server import config as nats_config
from asyncrl.bus.nats_server.server import find_binary
from benchmarks.far_link import NEAR, FarLink, unavailable
from tests.harness.tiny import files as tiny_files
from tests.harness.tiny.task import Policy

RESULTS: Final = Path("docs/results/far.jsonl")
_LIMIT_SECONDS: Final = 600.0
_MAX_STALENESS: Final = 8
CAPACITY: Final = 32
"""Number of sequences that the engine runs at once. Workers take two groups more, to have prompts for free slots."""

RUN_FILE: Final = """
[run]
name = "far"
directory = "{folder}/learner"
steps = {steps}

[model]
path = "{folder}/model"
dtype = "bfloat16"

[data]
path = "{folder}/prompts.jsonl"

[bus]
url = "nats://{host}:4222"
credentials = "{folder}/nats/far/{{role}}"

[rollout]
workers = 1
group_size = 4
max_new_tokens = 4096
max_running = {running}
partial_save_seconds = {partial_save_seconds}

[engine]
kind = "benchmarks.far_engine:FarEngine"
device = "cpu"
options = {{ mean_tokens = {mean_tokens}, capacity = {capacity} }}

[reward]
kind = "tests.harness.tiny.reward:TinyReward"

[learner]
backend = "benchmarks.far_backend:FarBackend"
device = "cpu"
threads = 1
groups_per_batch = 8
micro_batch_tokens = 16384
logprob_check_every = 1000000
options = {{ weights_bytes = {weights_bytes}, log = "{folder}/steps.jsonl" }}

[staleness]
max_staleness = {max_staleness}

[weights]
channel = "objects"
options = {{ delta_share = {delta_share} }}

[checkpoint]
every_steps = 0

[metrics]
console = false
mismatch_alarm = 0.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm.

    is_far  the worker is behind the link, with ``delay`` seconds and ``loss`` one way
    tcp     congestion control; "": the machine's
    """

    name: str
    is_far: bool = True
    delay: float = 0.1
    loss: float = 0.01
    tcp: str = ""
    weights_bytes: int = 2 * 2**20
    delta_share: float = 0.5
    mean_tokens: int = 1000
    workers: int = 1
    running: int = CAPACITY + 8
    partial_save_seconds: float = 3.0
    near: str = "near"


ARMS: Final = (
    Arm(name="near", is_far=False),
    Arm(name="rtt 50", delay=0.025),
    Arm(name="rtt 200", loss=0.0),
    Arm(name="far"),
    Arm(name="far cubic", tcp="cubic"),
    Arm(name="far cubic unsaved", tcp="cubic", partial_save_seconds=0.0),
    Arm(name="far cubic full", tcp="cubic", delta_share=0.0),
    Arm(name="near 32 MiB", is_far=False, weights_bytes=2**25, near="near 32 MiB"),
    Arm(name="far 32 MiB", weights_bytes=2**25, near="near 32 MiB"),
    Arm(name="far 32 MiB full", weights_bytes=2**25, delta_share=0.0, near="near 32 MiB"),
    Arm(name="far 32 MiB cubic", weights_bytes=2**25, tcp="cubic", near="near 32 MiB"),
    Arm(name="near tight", is_far=False, running=CAPACITY, near="near tight"),
    Arm(name="far tight", running=CAPACITY, near="near tight"),
    Arm(name="far tight cubic", running=CAPACITY, tcp="cubic", near="near tight"),
    Arm(name="near short", is_far=False, mean_tokens=100, near="near short"),
    Arm(name="far short", mean_tokens=100, near="near short"),
)
"""unsaved: no partial rollouts are saved on the bus. full: weights without deltas. tight: a worker takes no group for
which its engine has no free slot. short: answers of 100 tokens."""


def run_arm(arm: Arm, *, warmup: int, steps: int, keep: Path | None = None) -> dict[str, Any]:
    """Run one arm and return its row. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-far-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        tiny_files.write(folder, Policy.new(torch.Generator().manual_seed(0)))
        nats_config.main(["far", "--directory", str(folder / "nats"), "--listen", f"{NEAR}:4222"])
        (folder / "run.toml").write_text(
            RUN_FILE.format(
                folder=folder,
                host=NEAR,
                steps=warmup + steps + _MAX_STALENESS + 1,
                capacity=CAPACITY,
                max_staleness=_MAX_STALENESS,
                **asdict(arm),
            )
        )
        with FarLink(delay=arm.delay, loss=arm.loss, tcp=arm.tcp) as link:
            processes: list[subprocess.Popen[bytes]] = []
            try:
                processes.extend(_started(command, folder) for command in _commands(arm, link, folder))
                _until_done(processes, folder)
            finally:
                for process in reversed(processes):
                    process.kill()
                    process.wait()
            tcp = link.congestion_control()
        return _row(arm, folder, warmup=warmup, until=warmup + steps) | {"tcp": tcp, "how": link.how}


def _commands(arm: Arm, link: FarLink, folder: Path) -> list[list[str]]:
    """Return the commands of nats-server, learner and workers."""
    asyncrl = [sys.executable, "-m", "asyncrl"]
    run_file = str(folder / "run.toml")
    side = link.far if arm.is_far else link.near
    commands = [
        [*link.near, find_binary(), "--config", str(folder / "nats" / nats_config.CONFIG_FILE)],
        [*link.near, *asyncrl, "learner", run_file],
    ]
    for number in range(arm.workers):
        own = f"run.directory={folder / f'worker-{number}'}"
        commands.append([*side, *asyncrl, "rollout-worker", run_file, "--set", own, "--name", f"w{number}"])
    return commands


def _started(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output.txt").open("ab") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _until_done(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    server, learner, *workers = processes
    deadline = time.monotonic() + _LIMIT_SECONDS
    while learner.poll() is None:
        if server.poll() is not None or any(worker.poll() for worker in workers) or time.monotonic() > deadline:
            raise RuntimeError("the run broke off; its output ends: " + (folder / "output.txt").read_text()[-2000:])
        time.sleep(0.2)
    if learner.returncode:
        raise RuntimeError("the learner failed; the output ends: " + (folder / "output.txt").read_text()[-2000:])


def _row(arm: Arm, folder: Path, *, warmup: int, until: int) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()][:until]
    metrics = [json.loads(line) for line in (folder / "learner/far/metrics.jsonl").read_text().splitlines()][:until]
    seconds = steps[-1]["time"] - steps[warmup - 1]["time"]
    steady = metrics[warmup:]

    def mean(name: str) -> float:
        values: list[float] = [row[name] for row in steady if name in row]
        return sum(values) / max(len(values), 1)

    return asdict(arm) | {
        "steps": len(steps) - warmup,
        "seconds": seconds,
        "tokens_per_second": sum(step["tokens"] for step in steps[warmup:]) / seconds,
        "staleness_mean": mean("staleness/mean"),
        "lag_versions": mean("weights/lag_versions"),
        "dropped_groups": steady[-1]["staleness/dropped_groups"] - metrics[warmup - 1]["staleness/dropped_groups"],
        "rollout_idle": mean("rollout/idle_ratio"),
        "publish_bytes": mean("weights/publish_bytes"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    near = {row["name"]: row["tokens_per_second"] for row in rows if not row["is_far"]}
    lines = [
        f"{'arm':18s} {'rtt ms':>6s} {'loss':>5s} {'tcp':>6s} {'weights':>8s} {'delta':>5s} {'tokens/s':>9s} "
        f"{'against near':>12s} {'staleness':>9s} {'lag':>5s} {'dropped':>7s}"
    ]
    for row in rows:
        rtt, loss = (2000 * row["delay"], row["loss"]) if row["is_far"] else (0.0, 0.0)
        against = row["tokens_per_second"] / near[row["near"]] - 1 if row["near"] in near else float("nan")
        lines.append(
            f"{row['name']:18s} {rtt:6.0f} {loss:5.0%} {row['tcp']:>6s} {row['weights_bytes'] / 2**20:4.0f} MiB "
            f"{'yes' if row['delta_share'] else 'no':>5s} {row['tokens_per_second']:9,.0f} {against:12.1%} "
            f"{row['staleness_mean']:9.2f} {row['lag_versions']:5.2f} {row['dropped_groups']:7.0f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.far", description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], metavar="NAME")
    parser.add_argument("--warmup", type=int, default=6, help="steps (default 6)")
    parser.add_argument("--steps", type=int, default=24, help="steps measured (default 24)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="run nothing: the table of these rows")
    parser.add_argument("--json", type=Path, help=f"add rows to this file (such as {RESULTS})")
    parser.add_argument("--keep", type=Path, help="folder for the runs' files (default: removed)")
    options = parser.parse_args()
    if options.table:
        rows = [json.loads(line) for line in options.table.read_text().splitlines()]
        names = [arm.name for arm in ARMS]
        print(table(sorted(rows, key=lambda row: names.index(row["name"]))))
        return 0
    if problem := unavailable():
        print(f"skipped: {problem}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also removes the namespaces
    rows = []
    for arm in ARMS:
        if options.arms is None or arm.name in options.arms:
            keep = options.keep / arm.name.replace(" ", "-") if options.keep else None
            rows.append(run_arm(arm, warmup=options.warmup, steps=options.steps, keep=keep))
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
