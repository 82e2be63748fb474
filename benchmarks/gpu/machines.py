"""Train with ranks on two machines, under torchrun, and compare losses with the same ranks of one process tree.

    python -m benchmarks.gpu.machines --json FILE            0.6B on two GPUs: data, tensor and pipeline parallel
    python -m benchmarks.gpu.machines --layouts dp8 tp8 tp4-pp2                 four ranks on each of two machines
    python -m benchmarks.gpu.machines --device cpu --shapes tiny --tokens 512      a rehearsal over gloo

Each machine is a torchrun agent with half of the ranks and their GPUs. NCCL may use neither peer-to-peer access nor
shared memory, so all data go through sockets, as between hosts; its log says which path it took. With the first layout
the last rank is killed in a step. Both machines start again and continue from a checkpoint. `noticed` is the time until
the first rank had ended, and `trained` the time until the first step after that. All layouts run at the same time,
first in one tree and then as machines, so compare step times only with each other. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from benchmarks.gpu.arm import visible_devices
from benchmarks.gpu.learner import layout_of
from benchmarks.gpu.learner_step import Variant, worst_metric
from benchmarks.gpu.machines_rank import SAVED_STEP
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model

RANK: Final = ("-m", "benchmarks.gpu.machines_rank")
EVERYWHERE: Final = {"TORCHDYNAMO_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
SOCKETS_ONLY: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
MACHINES: Final = 2
KILL_STEP: Final = SAVED_STEP + 1
LARGEST_DIFFERENCE: Final = 0.02
"""Of a metric, relative: bfloat16 was seen to differ by 0.006."""
END_SECONDS: Final = 35.0
"""For an agent that was told to end; torchrun gives its rank 30."""
HEADER: Final = (
    f"{'variant':28} {'tree step s':>11} {'machines':>9} {'worst metric':>14} {'off by':>8} "
    f"{'noticed s':>9} {'trained s':>9}  paths of NCCL in the tree; between machines"
)


def message_in(line: str) -> dict[str, Any] | None:
    """Return the message of a rank (machines_rank.tell) in a line of its agent, or None.

    The agent and its children write to one pipe, so a message may follow a line that another process has not ended.
    """
    start = line.find('{"pid": ')
    if start < 0:
        return None
    try:
        message, _ = json.JSONDecoder().raw_decode(line, start)
    except ValueError:
        return None
    return message if "rank" in message or "step" in message else None


class Agents:
    """Processes whose children print messages; other lines go to logs."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path, *, limit: float) -> None:
        self._deadline = time.monotonic() + limit
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.processes = []
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        for number, (words, added) in enumerate(commands):
            environment = os.environ | dict(added)
            process = subprocess.Popen(words, env=environment, stdout=pipe, stderr=same, text=True, errors="replace")
            self.processes.append(process)
            file = log.with_suffix(f".{number}.log")
            threading.Thread(target=self._read, args=(process.stdout, file), daemon=True).start()

    def _read(self, lines: IO[str], log: Path) -> None:
        try:
            with lines, log.open("w") as file:
                for line in lines:
                    if (message := message_in(line)) is None:
                        print(line, end="", file=file, flush=True)
                    else:
                        self._heard.put(message)
        finally:
            self._heard.put(None)  # otherwise nobody would know of the end

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until all have ended. Raises TimeoutError after the limit."""
        open_ones = len(self.processes)
        while open_ones:
            try:
                message = self._heard.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError("no end within the limit") from None
            if message is None:
                open_ones -= 1
            else:
                yield message

    def end(self) -> int:
        """Return the worst exit code. Ends those that are still up; torchrun then ends its rank."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._deadline - time.monotonic()))
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
        return max(abs(process.wait()) for process in self.processes)


def in_one_tree(task: Mapping[str, Any], folder: Path, *, limit: float) -> dict[str, Any]:
    """Return the steps and the exit code of a learner that starts its other ranks itself."""
    environment = EVERYWHERE | logged(folder / "tree")
    agents = Agents([([sys.executable, *RANK, json.dumps(task)], environment)], folder / "tree", limit=limit)
    found: dict[str, Any] = {}
    try:
        found["steps"] = [message for message in agents.messages() if "step" in message]
    finally:
        found["exit_code"] = agents.end()
    return found


def logged(place: Path) -> dict[str, str]:
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{place}.nccl.%p"}


def paths(place: Path) -> list[str]:
    """Return how NCCL connected the ranks that logged to ``place``: "P2P", "SHM", "NET/Socket"."""
    text = "".join(log.read_text(errors="replace") for log in place.parent.glob(f"{place.name}.nccl.*"))
    return sorted(set(re.findall(r" via (NET/\w+|P2P|SHM)", text)))


def as_machines(task: Mapping[str, Any], folder: Path, *, limit: float, rank: Sequence[str] = RANK) -> dict[str, Any]:
    """Return the steps of two machines, and how long until the death of one was noticed and mended.

    rank  words that start a rank; the task follows
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = Variant(**task["variant"]).layout.ranks
    each = ranks // MACHINES
    words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={MACHINES}", f"--nproc-per-node={each}"]
    words += ["--max-restarts=3"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    words += [*rank, json.dumps(task)]
    shared = EVERYWHERE | SOCKETS_ONLY | logged(folder / "machine")
    places = [visible_devices(range(first, first + each)) for first in range(0, ranks, each)]
    commands = [(words, shared | {"CUDA_VISIBLE_DEVICES": place}) for place in places]
    agents = Agents(commands, folder / "machine", limit=limit)
    pids: dict[int, int] = {}
    steps: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    killed, killed_learner = 0.0, 0
    try:
        for message in agents.messages():
            if "rank" in message:
                pids[message["rank"]] = message["pid"]
            elif message["pid"] != killed_learner:
                steps[message["step"]] = message
                if killed:
                    found.setdefault("trained_seconds", time.monotonic() - killed)
                elif task["is_killed"] and message["step"] == KILL_STEP:
                    killed, killed_learner = time.monotonic(), pids[0]
                    kill(pids[ranks - 1], then=pids[0], limit=limit)
                    found["noticed_seconds"] = time.monotonic() - killed
    finally:
        found["exit_code"] = agents.end()
    return found | {"steps": [steps[step] for step in sorted(steps)]}


def kill(pid: int, *, then: int, limit: float) -> None:
    """Kill a process, and wait until another one has ended. Raises TimeoutError."""
    ended = os.pidfd_open(then)
    os.kill(pid, signal.SIGKILL)
    is_over = select.select([ended], [], [], limit)[0]
    os.close(ended)
    if not is_over:
        raise TimeoutError("one rank was killed, and the other one does not end")


def compared(variant: Variant, in_tree: Mapping[str, Any], machines: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a layout. It has failed unless both trained every step alike and ended orderly."""
    tree, steps = in_tree["steps"], machines["steps"]
    row = {**asdict(variant), "name": variant.name, **machines, "tree": tree, "tree_exit_code": in_tree["exit_code"]}
    is_whole = bool(steps) and [one["step"] for one in tree] == [one["step"] for one in steps]
    if not is_whole or in_tree["exit_code"] or machines["exit_code"]:
        return row | {"failed": True}
    off, name = worst_metric(tree, steps)
    return (
        ({} if off <= LARGEST_DIFFERENCE else {"failed": True})
        | row
        | {
            "worst_metric": name,
            "worst_metric_relative": off,
            "tree_step_seconds": float(np.median([one["seconds"] for one in tree[1:]])),
            "machines_step_seconds": float(np.median([one["seconds"] for one in steps[1:]])),
        }
    )


def table_row(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:28} failed"
    return (
        f"{row['name']:28} {row['tree_step_seconds']:11.3f} {row['machines_step_seconds']:9.3f} "
        f"{row['worst_metric']:>14} {row['worst_metric_relative']:8.1e} {row.get('noticed_seconds', math.nan):9.1f} "
        f"{row.get('trained_seconds', math.nan):9.1f}  {', '.join(row['tree_paths'])}; {', '.join(row['paths'])}"
    )


def measure(arguments: argparse.Namespace, place: Path, layout: str) -> dict[str, Any]:
    """Measure one layout of the model in ``place``, where its logs and its checkpoint go."""
    variant = Variant(shape=place.name, tokens=arguments.tokens, length=256, overlap=False, **layout_of(layout))
    folder = place / variant.name
    folder.mkdir()
    task = {
        "variant": asdict(variant),
        "model": str(place / "model"),
        "state": str(folder / "state"),
        "device": arguments.device,
        "dtype": arguments.dtype,
        "steps": arguments.steps,
        "is_killed": layout == arguments.layouts[0],
    }
    tree: dict[str, Any] = {"steps": [], "exit_code": 1}
    machines = dict(tree)
    try:
        tree = in_one_tree(task, folder, limit=arguments.limit)
        machines = as_machines(task, folder, limit=arguments.limit)
    except TimeoutError as error:
        machines["problem"] = str(error)
    found = {"tree_paths": paths(folder / "tree"), "paths": paths(folder / "machine")}
    is_by_sockets = arguments.device == "cpu" or found["paths"] == ["NET/Socket"]
    return compared(variant, tree, machines) | found | ({} if is_by_sockets else {"failed": True})


def lead(arguments: argparse.Namespace, folder: Path, given: Sequence[str] | None) -> int:
    is_whole = True
    print(HEADER, flush=True)
    for shape in arguments.shapes:
        place = folder / shape
        make_model(SHAPES[shape], place / "model", dtype=arguments.dtype)
        with ThreadPoolExecutor(len(arguments.layouts)) as threads:
            rows = threads.map(functools.partial(measure, arguments, place), arguments.layouts)
        for row in rows:
            print(table_row(row), flush=True)
            if "failed" in row:
                for log in sorted((place / row["name"]).glob("*.log")):
                    print(f"# {log.name}", log.read_text()[-2000:], sep="\n", file=sys.stderr, flush=True)
                is_whole = False
            keep(row | {"command": command("benchmarks.gpu.machines", given), **machine()}, arguments.json)
    return 0 if is_whole else 1


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a layout failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one object a line")
    parser.add_argument("--shapes", nargs="*", default=["0.6B"], choices=list(SHAPES))
    parser.add_argument("--layouts", nargs="*", default=["dp2", "tp2", "pp2"], help="of an even number of ranks")
    parser.add_argument("--tokens", type=int, default=4096, help="of a packed row")
    parser.add_argument("--steps", type=int, default=5, help=f"a rank is killed after step {KILL_STEP}")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each of the two kinds")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(given)
    arguments.dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as temporary:
        return lead(arguments, Path(temporary), given)


if __name__ == "__main__":
    sys.exit(main())
