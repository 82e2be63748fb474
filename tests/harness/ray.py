"""A Ray cluster of two nodes on this machine, and runs on it with real raylets, actors, processes and nats-servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

from tests.chaos.run_files import ANSWERS
from tests.harness.audits import audited
from tests.harness.forked import ForkedCommand, ForkServer
from tests.harness.ports import free_ports

RUN: Final = (
    "run.restarts=3",
    "rollout.workers=1",
    'engine.kind="tests.harness.tiny.engine:TinyEngine"',
    "engine.options={step_seconds=0.1}",
)
"""Overrides of the storms' run file. The engine has no meter, because nothing reads it here."""
CPUS = 4
GPUS = 2
"""Per node, as Ray counts them. Ray only assigns GPU numbers; it does not check that the GPUs exist."""
WINDOW_STEPS = 5
"""Steps that a full window of groups lasts: max_staleness + 1."""
SECONDS = 300.0
"""Limit of every wait, which takes seconds on an idle machine."""
_STARTS: Final = 4


class TwoNodes:
    """Nodes a (the head) and b, labelled site = a and site = b, with a server for ray://."""

    def __init__(self) -> None:
        node = {
            "num_cpus": CPUS,
            "num_gpus": GPUS,
            "object_store_memory": 80 * 2**20,
            "include_log_monitor": False,  # would print process output in drivers that ask for it; none does
        }
        self._node = node
        (port,) = free_ports(1)
        self.client = f"ray://127.0.0.1:{port}"
        self._cluster = _started(
            node
            | {
                "include_dashboard": False,
                "ray_client_server_port": port,
                "no_monitor": True,  # would request machines from a cloud
                "labels": {"site": "a"},
                "_system_config": {
                    "enable_worker_prestart": False,
                    "prestart_worker_first_driver": False,
                    "worker_niceness": 0,  # default 15; a run on Ray would only get the CPU time that other tests leave
                },
            }
        )
        self.address: str = self._cluster.address
        self.a: str = self._cluster.head_node.node_id
        self._second: Any = None
        self.mend()
        self.watch()

    def watch(self) -> None:
        """Connect this process to inspect the cluster."""
        ray.init(self.address, namespace="test", log_to_driver=False, logging_level="ERROR")

    def leave(self) -> None:
        """Disconnect for a while, so that this process can act as a launcher's."""
        ray.shutdown()

    @property
    def b(self) -> str:
        return str(self._second.node_id)

    @property
    def logs(self) -> Path:
        return Path(self._cluster.head_node.get_logs_dir_path())

    def mend(self) -> None:
        """Start node b unless it is up."""
        if self._second is None:
            self._second = self._cluster.add_node(**self._node, labels={"site": "b"})

    def kill_b(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def places(self) -> dict[str, str]:
        """Return name -> node of all placement groups that have a node."""
        table = ray.util.placement_group_table().values()
        return {one["name"]: one["bundles_to_node_id"][0] for one in table if one["state"] == "CREATED"}

    def left_behind(self) -> list[str]:
        """Return placement groups and actors that still exist."""
        groups = [
            f"group {one['name']}" for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"
        ]
        actors = [f"actor {one['namespace']}/{one['name']}" for one in ray.util.list_named_actors(all_namespaces=True)]
        return groups + actors

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _started(head: dict[str, Any]) -> Cluster:
    """Start a cluster, with retries: Ray gives a node 30 s to start, which is sometimes too short on a loaded
    machine."""
    for _ in range(_STARTS - 1):
        with contextlib.suppress(Exception):  # the exception that Ray raises
            return Cluster(initialize_head=True, head_node_args=head)
    return Cluster(initialize_head=True, head_node_args=head)


class RayRun:
    """`asyncrl run --launcher ray` of the tiny task, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        cluster: TwoNodes,
        forks: ForkServer,
        *overrides: str,
        name: str = "storm",
        launcher: str = "ray",
    ) -> None:
        """forks: starts commands, the run's own among them, without imports"""
        self._launcher = launcher
        self.folder = folder
        self._forks = forks
        self._overrides = [f"run.name={name}", *RUN, *overrides]
        self._env = os.environ | forks.environment | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
        self._output = folder / f"{name}.txt"
        self.directory = folder / "runs" / name
        self._process: ForkedCommand | None = None
        if not (folder / "run.toml").exists():
            made = ANSWERS["short"]
            made.write(folder, 0)
            (folder / "run.toml").write_text(made.run_file.format(folder=folder, seed=0, port=0))

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def step(self) -> int:
        """The newest trained step."""
        try:
            return int(json.loads((self.directory / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    def start(self, *arguments: str, steps: int = 1_000_000) -> None:
        words = self._words("run", "--launcher", self._launcher, "--set", f"run.steps={steps}", *arguments)
        self._process = self._forks.run(words, environment=self._env, output=self._output)

    def scale(self, count: int, *arguments: str) -> int:
        """Return the exit code of `asyncrl scale`."""
        return self.call("scale", "--rollout-workers", str(count), *arguments)[0]

    def call(self, verb: str, *arguments: str) -> tuple[int, str]:
        """Return the exit code and the output of a command on the run file."""
        return self._forks.call(*self._words(verb, *arguments), environment=self._env)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(SECONDS)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def until(self, is_so: Callable[[], object], what: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert self._process.poll() is None, f"{what}: the run ended before\n{self.said}"
            assert time.monotonic() < deadline, f"{what}: did not come\n{self.said}"
            time.sleep(0.05)

    def until_trained(self, steps: int = WINDOW_STEPS + 2) -> None:
        """Wait for ``steps`` more steps. The default exceeds the groups in flight, so that workers must sample."""
        first = self.step
        self.until(lambda: self.step >= first + steps, f"{steps} steps behind step {first}")

    def has_loaded(self, worker: str) -> bool:
        """Return whether a worker of this name has loaded new weights, which shows that it works."""
        log = self.directory / "logs" / f"{worker}.log"
        return log.exists() and "loaded version" in log.read_text()

    def processes(self) -> dict[str, tuple[int, int]]:
        """Return name -> (pid, parent pid) of learner, workers, nats-server, and "run" (parent: 0)."""
        found = {"run": (self._process.pid, 0)} if self._process and self._process.poll() is None else {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):  # the process has just ended
                continue
            if any(str(self.folder) in word for word in words):
                name = "nats-server" if "nats-server" in words[0] else words[words.index("-m") + 2]
                name = words[words.index("--name") + 1] if name.endswith("-worker") else name
                found[name] = (int(folder.name), parent)
        return found

    def visible_gpus(self, name: str) -> str | None:
        pid, _ = self.processes()[name]
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word).get("CUDA_VISIBLE_DEVICES")

    def audit(self) -> dict[str, Any]:
        return audited(self.directory)

    def _words(self, verb: str, *arguments: str) -> list[str]:
        sets = [word for item in self._overrides for word in ("--set", item)]
        return [verb, str(self.folder / "run.toml"), *sets, *arguments]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
