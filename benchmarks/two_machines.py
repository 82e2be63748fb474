"""A run on two network namespaces of this host with only TCP between them, started by hand; parts of it are killed.

    sudo python -m benchmarks.two_machines [--engine sglang] [--json FILE]

Each namespace has its own loopback device and /dev/shm; a pair of virtual interfaces joins them, and both see the
disk. On each a torchrun agent has two ranks of the learner (two pipeline stages, so that activations travel, of two
copies), as docs/guides/scaling.md says. ``inprocess``: each has a rollout worker. ``sglang``: one engine spans both,
and the learner is one process. A row is a kill: seconds until the next trained step that is newer than all before, and
at the end, after everything was killed at once, the audit of every group. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.bus.nats_server.server import find_binary
from asyncrl.data import demo_task
from asyncrl.os_process import exiting_on_signals
from benchmarks.gpu.rows import command, keep, machine

NAMES: Final = ("asyncrl-m1", "asyncrl-m2")
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
LINKS: Final = ("asyncrl-v1", "asyncrl-v2")
LIMIT_SECONDS: Final = 1200.0
RUN_FILE: Final = """
[run]
directory = "runs"
steps = 1000000
[model]
path = "model"
[data]
path = "prompts.jsonl"
[engine]
device = "cpu"
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
device = "cpu"
groups_per_batch = 8
threads = 1
[rollout]
group_size = 4
max_new_tokens = 8
max_running = 8
[weights]
channel = "files"
[checkpoint]
every_steps = 4
[bus]
url = "nats://10.77.0.1:4222"
ack_seconds = 15.0
"""
LEARNER_OF_FOUR: Final = ("learner.backend=megatron", "learner.ranks=4", "learner.pipeline_parallel=2")


def call(*words: str, check: bool = True) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=check).stdout


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Make two network namespaces with a link between them. At the end everything in them is killed."""
    try:
        for name in NAMES:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for name, link, address in zip(NAMES, LINKS, ADDRESSES, strict=True):
            call("ip", "link", "set", link, "netns", name)
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            for device in (link, "lo"):
                call("ip", "-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            kill_all(name)
            call("ip", "netns", "del", name, check=False)


def pids(name: str) -> list[int]:
    return [int(pid) for pid in call("ip", "netns", "pids", name, check=False).split()]


def kill_all(*names: str) -> None:
    for pid in (pid for name in names for pid in pids(name)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def process(name: str, *words: str, rank: int | None = None) -> int:
    """Return the newest process of a namespace whose command has all ``words`` as arguments; of that rank, if given."""
    found = []
    for pid in pids(name):
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            its = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            if set(words) <= set(said) and (rank is None or f"RANK={rank}" in its):
                found.append(pid)
    if not found:
        raise LookupError(f"{name} runs no {' '.join(words)}")
    return max(found)


class Machines:
    """The processes of a run on both namespaces."""

    def __init__(self, folder: Path, *, engine: str) -> None:
        self.folder, self.engine = folder, engine
        self.sets = [f"engine.kind={engine}"]
        if engine == "sglang":
            self.sets += ["engine.options={tensor_parallel=2, machines=2}", "learner.backend=reference"]
        else:
            self.sets += LEARNER_OF_FOUR
        self.logs = folder / "said"
        self.logs.mkdir()
        self.agents_started = 0
        """torchrun agents that ended by themselves and were started again."""

    def start(self, machine: int, name: str, *words: str) -> None:
        inside = 'mount -t tmpfs tmpfs /dev/shm; exec "$@"'  # SGLang takes processes with one /dev/shm for one machine
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": LINKS[machine],
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", "")))),
        }
        with (self.logs / f"{machine + 1}-{name}").open("ab") as output:
            subprocess.Popen(
                ["ip", "netns", "exec", NAMES[machine], "unshare", "-m", "sh", "-c", inside, "sh", *words],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def asyncrl(self, verb: str, *words: str) -> tuple[str, ...]:
        sets = (word for item in self.sets for word in ("--set", item))
        return ("-m", "asyncrl", verb, "run.toml", *sets, *words)

    def start_bus(self) -> None:
        self.start(0, "nats", find_binary(), "-js", "-sd", "nats", "-a", ADDRESSES[0], "-p", "4222")

    def start_learner(self, machine: int) -> None:
        if self.engine == "sglang" and machine:
            return
        if self.engine == "sglang":
            self.start(machine, "learner", sys.executable, *self.asyncrl("learner", "--resume"))
            return
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--max-restarts", "100"]
        meeting += ["--rdzv-conf", f"is_host={machine == 0}"]  # neither namespace's address is that of the host's name
        words = (*torchrun, *meeting, "--local-addr", ADDRESSES[machine], *self.asyncrl("learner", "--resume"))
        self.start(machine, "learner", *words)

    def start_sampling(self, machine: int) -> None:
        if self.engine == "inprocess":
            words = self.asyncrl("rollout-worker", "--name", f"w{machine}")
        elif machine == 0:
            words = self.asyncrl("rollout-worker", "--name", "w0", "--meet", f"{ADDRESSES[0]}:29600")
        else:
            words = self.asyncrl("engine-node", "--worker", "w0", "--meet", f"{ADDRESSES[0]}:29600")
        self.start(machine, "sampling", sys.executable, *words)

    # -- kills ---------------------------------------------------------------------------------------------------------

    def kill_rank_on_2(self) -> None:
        os.kill(process(NAMES[1], "asyncrl", "learner", rank=3), signal.SIGKILL)

    def kill_learner(self) -> None:
        if self.engine == "inprocess":
            os.kill(process(NAMES[0], "asyncrl", "learner", rank=0), signal.SIGKILL)
        else:
            os.kill(process(NAMES[0], "asyncrl", "learner"), signal.SIGKILL)
            self.start_learner(0)

    def kill_machine_1(self) -> None:
        """With it go the bus, rank 0 and the agent at which all agents meet."""
        kill_all(NAMES[0])
        self.start_bus()
        self.start_learner(0)
        self.start_sampling(0)

    def kill_machine_2(self) -> None:
        kill_all(NAMES[1])
        self.start_learner(1)
        self.start_sampling(1)
        if self.engine == "sglang":
            self._start_worker_again()

    def kill_worker_on_1(self) -> None:
        os.kill(process(NAMES[0], "asyncrl", "rollout-worker"), signal.SIGKILL)
        self.start_sampling(0)

    def kill_part_on_2(self) -> None:
        os.kill(process(NAMES[1], "sglang.launch_server", "--node-rank"), signal.SIGKILL)
        self._start_worker_again()

    def cut_link(self) -> None:
        call("ip", "-n", NAMES[1], "link", "set", LINKS[1], "down")
        time.sleep(10.0)
        call("ip", "-n", NAMES[1], "link", "set", LINKS[1], "up")

    def _start_worker_again(self) -> None:
        """Start the worker once it has noticed: by hand nobody else does."""
        deadline = time.monotonic() + LIMIT_SECONDS
        with contextlib.suppress(LookupError):
            while process(NAMES[0], "asyncrl", "rollout-worker") and time.monotonic() < deadline:
                time.sleep(0.1)
        self.start_sampling(0)

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        metrics = next(iter(self.folder.glob("runs/*/metrics.jsonl")), None)
        lines = metrics.read_text().splitlines(keepends=True)[-2:] if metrics else []
        return max((int(json.loads(line)["step"]) for line in lines if line.endswith("\n")), default=0)

    def wait_for(self, step: int) -> float:
        """Return the seconds until this step is trained. Raises TimeoutError."""
        began = time.monotonic()
        while self.steps < step:
            if time.monotonic() - began > LIMIT_SECONDS:
                raise TimeoutError(f"step {step} was not trained within {LIMIT_SECONDS:g} s; at {self.steps}")
            self._start_agents_again()
            time.sleep(0.5)
        return time.monotonic() - began

    def _start_agents_again(self) -> None:
        """Start torchrun again where it has ended: it gives up if another agent is lost while they meet."""
        for number, name in enumerate(NAMES if self.engine == "inprocess" else ()):
            try:
                process(name, "torch.distributed.run")
            except LookupError:
                self.start_learner(number)
                self.agents_started += 1
                time.sleep(5.0)  # until its command is there

    def audit(self) -> dict[str, Any]:
        self.start_bus()
        run = str(next(iter(self.folder.glob("runs/*"))))
        words = ["ip", "netns", "exec", NAMES[0], sys.executable, "-m", "asyncrl", "audit", run, "--json"]
        found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=self.folder)
        if not found.stdout:
            raise RuntimeError(found.stderr)
        audited: dict[str, Any] = json.loads(found.stdout)
        return audited | {"exit_code": found.returncode}


KILLS: Final = {
    "inprocess": ("kill_rank_on_2", "kill_learner", "kill_machine_1", "kill_machine_2", "kill_worker_on_1", "cut_link"),
    "sglang": ("kill_part_on_2", "kill_learner", "kill_machine_1", "kill_machine_2", "kill_worker_on_1"),
}


def measure(machines: Machines, kills: Sequence[str]) -> Iterator[dict[str, Any]]:
    machines.start_bus()
    for number in (0, 1):
        machines.start_learner(number)
        machines.start_sampling(number)
    seconds = machines.wait_for(6)
    yield {"what": "start", "seconds": seconds}
    for kill in kills:
        machines.wait_for(machines.steps + 3)
        step, began = machines.steps, time.monotonic()
        getattr(machines, kill)()
        machines.wait_for(step + 2)  # one may have been on its way
        seconds, again = time.monotonic() - began, machines.agents_started
        yield {"what": kill, "step": step, "seconds": seconds, "agents_started_again": again}
    step = machines.steps
    kill_all(*NAMES)
    audit = machines.audit()
    yield {"what": "audit", "step": step, **{key: audit[key] for key in audit if isinstance(audit[key], int | bool)}}


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a run does not go on, or the audit is not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one object a line")
    parser.add_argument("--engine", choices=list(KILLS), default="inprocess")
    parser.add_argument("--kills", nargs="*", help="default: all")
    arguments = parser.parse_args(given)
    if os.geteuid() or shutil.which("ip") is None:
        parser.error("network namespaces need root and iproute2")
    with exiting_on_signals(), tempfile.TemporaryDirectory() as temporary, two_namespaces():
        folder = Path(temporary)
        demo_task.write(folder)
        (folder / "run.toml").write_text(RUN_FILE)
        machines = Machines(folder, engine=arguments.engine)
        row: dict[str, Any] = {}
        try:
            for row in measure(machines, arguments.kills or KILLS[arguments.engine]):
                print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
                about = {"engine": arguments.engine, "command": command("benchmarks.two_machines", given), **machine()}
                keep(row | about, arguments.json)
        except (TimeoutError, LookupError, RuntimeError) as error:
            print(f"failed: {error}", file=sys.stderr)
            for log in sorted(machines.logs.iterdir()):
                print(f"# {log.name}", log.read_text(errors="replace")[-3000:], sep="\n", file=sys.stderr)
            return 1
    return int(row["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
