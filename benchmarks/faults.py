"""Injects faults into runs of real processes on a real nats-server and measures how soon each is named, and how.

    python -m benchmarks.faults [--json FILE]

A tiny model trains on two CPU cores. What hangs is a subclass of a real part that waits while a file is there; what
freezes is stopped by SIGSTOP; what is cut off goes through a proxy that forwards nothing more. docs/liveness.md has
the table. tests/test_liveness.py runs some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.data import demo_task

NAMED_SECONDS = 30.0
"""Nothing may ever take longer to be named; 10 s is the promise on a machine that is not busy with other things."""

PARTS = '''
"""Parts of a run that hang while a file of their name is there."""
import asyncio, time
from pathlib import Path
from asyncrl.actors.rollouts import single_turn
from asyncrl.backends.reference import ReferenceBackend
from asyncrl.data import demo_task
from asyncrl.engines.inprocess import InProcessEngine, Options
from asyncrl.weights.files import FilesChannel

HERE = Path(__file__).parent
real_time = time.time
time.time = lambda: real_time() + 3600.0 * is_on("clock")

def is_on(name):
    return (HERE / name).exists()

def hang(name):
    while is_on(name):
        time.sleep(0.05)

async def wait(name):
    while is_on(name):
        await asyncio.sleep(0.05)

def reward(sample):
    hang("reward")
    if is_on("raises"):
        raise KeyError("label")
    return demo_task.reward(sample)

async def rollout(prompt, generate, *, index):
    await wait("rollout")
    hang("blocked")
    return await single_turn(prompt, generate, index=index)

def keeps(group):
    return not is_on("filtered")

class Engine(InProcessEngine):
    async def start(self):
        if is_on("start"):
            (HERE / "begun").touch()
        await wait("start")
        await super().start()

    async def generate(self, *arguments, **named):
        await wait("engine")
        return await super().generate(*arguments, **named)

    async def load(self, weights):
        await wait("load")
        return await super().load(weights)

class Backend(ReferenceBackend):
    def step(self, *arguments, **named):
        hang("step")
        return super().step(*arguments, **named)

    def export(self):
        hang("backend")
        return super().export()

    def save(self, folder):
        hang("checkpoint")
        return super().save(folder)

class Channel(FilesChannel):
    def publish(self, *arguments, **named):
        hang("write")
        return super().publish(*arguments, **named)

    def verify(self, weights):
        hang("folder")
        return super().verify(weights)
'''

RUN_FILE = """
[run]
name = "faults"
directory = "runs"
steps = 1000000
stall_seconds = 3600  # they are to be named, not mended
[model]
path = "model"
[data]
path = "prompts.jsonl"
[engine]
kind = "parts:Engine"
options = {threads = 1}
[reward]
kind = "parts:reward"
timeout_seconds = 300
[learner]
backend = "parts:Backend"
groups_per_batch = 8
threads = 1
[algorithm]
filters = ["parts:keeps"]
[rollout]
function = "parts:rollout"
workers = 2
group_size = 4
max_new_tokens = 8
max_running = 8
[staleness]
max_staleness = 1
[weights]
channel = "parts:Channel"
[checkpoint]
every_steps = 2
[metrics]
console = false
"""


def prepare(folder: Path) -> None:
    demo_task.write(folder)
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "parts.py").write_text(PARTS)


class Run:
    """`asyncrl run` in a prepared folder, and what it says on stderr."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            _command("run", *overrides),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self.said: list[str] = []
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.said.append(line.rstrip())
                self._heard.notify_all()

    def wait_for(self, text: str, *, after: int = 0, seconds: float = NAMED_SECONDS) -> str:
        """The line with ``text``, among those from ``after`` on. Raises TimeoutError with all that was said."""

        def found() -> str:
            return next((line for line in self.said[after:] if text in line), "")

        with self._heard:
            if not self._heard.wait_for(found, timeout=seconds):
                raise TimeoutError(f"{text!r} was not said:\n" + "\n".join(self.said[after:]))
            return found()

    def wait_for_steps(self, count: int, *, seconds: float = 120.0) -> None:
        """Until so many more steps are trained. Raises TimeoutError."""
        metrics = self.folder / "runs" / "faults" / "metrics.jsonl"

        def steps() -> int:
            return len(metrics.read_text().splitlines()) if metrics.exists() else 0

        goal, end = steps() + count, time.monotonic() + seconds
        while steps() < goal:
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"no step {goal}:\n" + "\n".join(self.said))
            time.sleep(0.1)

    def pid(self, *words: str) -> int:
        """Of the child whose command line has these words; 0 when there is none."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and all(any(word in part for part in command) for word in words):
                    return int(name)
        return 0

    def bus(self) -> tuple[str, str]:
        """(url, token) of the run's nats-server."""
        table = json.loads((self.folder / "runs" / "faults" / "bus.json").read_text())
        return table["url"], table["token"]

    def worker(self, name: str, *, url: str = "") -> subprocess.Popen[bytes]:
        """A rollout worker that nobody here keeps up."""
        own, token = self.bus()
        return subprocess.Popen(
            [*_command("rollout-worker", f"bus.url={url or own}"), "--name", name],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment() | {"ASYNCRL_BUS_TOKEN": token},
        )

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """Exit code and answer of `asyncrl doctor --json`."""
        done = subprocess.run(
            [*_command("doctor"), "--json"], cwd=self.folder, capture_output=True, text=True, check=False
        )
        return done.returncode, json.loads(done.stdout)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.wait_for("draining")
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self._listener.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def _command(verb: str, *overrides: str) -> list[str]:
    words = [word for item in overrides for word in ("--set", item)]
    return [sys.executable, "-m", "asyncrl", verb, "run.toml", *words]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def running(folder: Path, *overrides: str) -> Iterator[Run]:
    """A run in ``folder``, with its workers if it has any: three steps old."""
    run = Run(folder, *overrides)
    try:
        if "rollout.workers=0" not in overrides:
            run.wait_for_steps(5)
        yield run
    finally:
        run.end()


# -- injections --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hanging(folder: Path, name: str) -> Iterator[None]:
    """The part of this name does not return."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT behind."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """No file of this process may grow."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


class Proxy:
    """A way to a server that can fall silent without being closed, as a half-open connection does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        while not self.is_silent:
            for ready in select.select([client, server], [], [], 0.1)[0]:
                data = ready.recv(2**16)
                if not data:
                    client.close()
                    server.close()
                    return
                if not self.is_silent:
                    (server if ready is client else client).sendall(data)
        time.sleep(3600)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    seconds: float
    said: str


def measure(
    run: Run,
    what: str,
    text: str,
    injected: contextlib.AbstractContextManager[None],
    *,
    seconds: float = NAMED_SECONDS,
) -> Measured:
    """Inject until it is named, with ``text``. Raises TimeoutError."""
    before = len(run.said)
    with injected:
        began = time.monotonic()
        line = run.wait_for(text, after=before, seconds=seconds)
        took = time.monotonic() - began
    return Measured(what, took, line.removeprefix("asyncrl run: "))


def of_own_processes(folder: Path) -> Iterator[Measured]:
    """What a run's own processes can suffer, healed one after the other."""
    with running(folder) as run:

        def parts(name: str) -> contextlib.AbstractContextManager[None]:
            return hanging(folder, name)

        faults: list[tuple[str, str, Callable[[], contextlib.AbstractContextManager[None]]]] = [
            ("engine hangs", "engine has not answered", lambda: parts("engine")),
            ("reward hangs", "reward function has not returned", lambda: parts("reward")),
            ("rollout function hangs", "rollout function has not returned", lambda: parts("rollout")),
            ("weight load hangs", "has not loaded its weights", lambda: parts("load")),
            ("weight folder hangs", "has been reading a weight folder", lambda: parts("folder")),
            ("training step hangs", "has been in one training step", lambda: parts("step")),
            ("backend hangs in export", "backend has not answered", lambda: parts("backend")),
            ("checkpoint hangs", "a checkpoint to be written", lambda: parts("checkpoint")),
            ("writing weights hangs", "weights to be written", lambda: parts("write")),
            ("event loop blocks", "its event loop is blocked", lambda: parts("blocked")),
            ("clock jumps by an hour", "jumped by +3600 s", lambda: parts("clock")),
            ("nothing left to learn from", "filtered out", lambda: parts("filtered")),
            ("SIGSTOP of a worker", "worker w1 is stopped (SIGSTOP)", lambda: stopped(run.pid("rollout-worker", "w1"))),
            ("SIGSTOP of the learner", "learner is stopped (SIGSTOP)", lambda: stopped(run.pid("asyncrl", "learner"))),
            ("SIGSTOP of nats-server", "its process is stopped", lambda: stopped(run.pid("nats-server"))),
        ]
        for what, text, inject in faults:
            before = len(run.said)
            yield measure(run, what, text, inject())
            run.wait_for("over after", after=before, seconds=90)
            run.wait_for_steps(3)
        yield measure(run, "disk of nats-server full", "has stored nothing", full_disk(run.pid("nats-server")))


def of_joined_workers(folder: Path) -> Iterator[Measured]:
    """What workers suffer that joined by themselves, and what their absence means."""
    with running(folder, "rollout.workers=0") as run:
        run.wait_for("there is no rollout worker", seconds=120)
        with joined(run, "x0") as worker:
            yield measure(run, "last worker leaves", "there is no rollout worker", _drained(worker))
        yield measure(run, "worker starts and hangs", "has been starting", _starting(run), seconds=60)
        proxy = Proxy(run.bus()[0])
        with joined(run, "x1", url=proxy.url):
            yield measure(run, "connection half open", "worker x1 has not been heard of", _silent(proxy))
        with joined(run, "x2") as worker:
            yield measure(run, "kill -9 of a remote worker", "worker x2 has not been heard of", _killed(worker))
        with joined(run, "x4"):
            yield measure(run, "all prompts are buried", "groups were all buried", hanging(folder, "raises"))
            run.process.wait(60)


@contextlib.contextmanager
def joined(run: Run, name: str, *, url: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has worked for some steps."""
    worker = run.worker(name, url=url)
    try:
        run.wait_for_steps(4)
        yield worker
    finally:
        worker.kill()
        worker.wait()


@contextlib.contextmanager
def _starting(run: Run) -> Iterator[None]:
    """A worker whose engine hangs from the first instant of its start."""
    with hanging(run.folder, "start"):
        worker = run.worker("x3")
        try:
            while not (run.folder / "begun").exists():  # until then it imports
                time.sleep(0.01)
            yield
        finally:
            worker.kill()
            worker.wait()
            (run.folder / "begun").unlink(missing_ok=True)


@contextlib.contextmanager
def _silent(proxy: Proxy) -> Iterator[None]:
    proxy.is_silent = True
    yield


@contextlib.contextmanager
def _killed(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    worker.kill()
    yield


@contextlib.contextmanager
def _drained(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    worker.terminate()
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for one line a fault")
    parser.add_argument("--only", choices=["own", "joined"], help="one of the two runs")
    options = parser.parse_args()
    rows = []
    scenarios = {"own": of_own_processes, "joined": of_joined_workers}
    for scenario in [scenarios[options.only]] if options.only else scenarios.values():
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name))
            for row in scenario(Path(name)):
                rows.append(row)
                print(f"{row.what:30s} {row.seconds:5.1f} s   {row.said}", flush=True)
    late = [row.what for row in rows if row.seconds > 10]
    print(f"{len(rows)} kinds of fault, {len(rows) - len(late)} named within 10 s; later: {', '.join(late) or 'none'}")
    if options.json:
        lines = [json.dumps({"what": row.what, "seconds": row.seconds, "said": row.said}) + "\n" for row in rows]
        options.json.write_text("".join(lines))


if __name__ == "__main__":
    main()
