"""A run of real processes and its own diagnosis. A part hangs while a file with its name is in the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from asyncrl.data import demo_task
from tests.harness.forked import LAUNCHER, ForkedCommand, ForkServer
from tests.harness.processes import processes_below

NAMED_SECONDS = 120.0
"""Limit for naming a fault on a busy machine; on an idle one the promise is 10 s."""

PARTS = '''
"""Parts of a run; each hangs while a file of its name exists."""
import asyncio, time
from pathlib import Path
from asyncrl.environments.builtin import single_turn
from asyncrl.backends.reference import ReferenceBackend
from asyncrl.data import demo_task
from asyncrl.engines.inprocess.engine import InProcessEngine, Options
from asyncrl.weights.files import FilesChannel

HERE = Path(__file__).parent

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
        await asyncio.sleep(0.6)  # leaves the cores to tests beside it
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
drop_alarm = 0.0  # what is made while a part hangs is dropped, rightly, at this bound
"""


def prepare(folder: Path) -> None:
    demo_task.write(folder)
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "parts.py").write_text(PARTS)


class Run:
    """`asyncrl run` in a prepared folder, and its stderr. ``forks``: starts its processes without imports."""

    def __init__(self, folder: Path, *overrides: str, forks: ForkServer | None = None) -> None:
        self.folder = folder
        self._forks = forks
        self.process: subprocess.Popen[str] | ForkedCommand
        if forks is None:
            self.process = subprocess.Popen(
                _command("run", *overrides),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=_environment(),
            )
            output = self.process.stderr
        else:
            pipe = folder / "output"
            pipe.unlink(missing_ok=True)  # left by an earlier run in this folder
            os.mkfifo(pipe)
            words = _command("run", *overrides, LAUNCHER)[3:]
            self.process = forks.run(
                words, environment=_environment() | forks.environment, output=pipe, directory=folder
            )
            output = pipe.open()
        self.said: list[str] = []
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen, args=(output,), daemon=True)
        self._listener.start()

    def _listen(self, output: TextIO) -> None:
        with output:
            for line in output:
                with self._heard:
                    self.said.append(line.rstrip())
                    self._heard.notify_all()

    def wait_for(self, text: str, *, after: int = 0, seconds: float = NAMED_SECONDS) -> str:
        """Return the first line with ``text``, from line ``after`` on. Raises TimeoutError with the whole output."""

        def found() -> str:
            return next((line for line in self.said[after:] if text in line), "")

        with self._heard:
            if not self._heard.wait_for(found, timeout=seconds):
                raise TimeoutError(f"{text!r} was not said:\n" + "\n".join(self.said[after:]))
            return found()

    def wait_for_steps(self, count: int) -> None:
        """Wait until ``count`` more steps are trained. Raises TimeoutError."""
        metrics = self.folder / "runs" / "faults" / "metrics.jsonl"

        def steps() -> int:
            return len(metrics.read_text().splitlines()) if metrics.exists() else 0

        goal = steps() + count
        self.wait_until(lambda: steps() >= goal, f"step {goal}")

    def wait_until(self, is_so: Callable[[], bool], what: str, *, seconds: float = 240.0) -> None:
        """Wait while the run is up. Raises TimeoutError with ``what`` and the whole output."""
        end = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"{what}: did not come\n" + "\n".join(self.said))
            time.sleep(0.1)

    def pid(self, name: str) -> int:
        """Return the pid of the child with this name: learner, w0, nats-server; 0 if there is none."""
        found = processes_below(self.process.pid)
        if self._forks is not None:
            found |= self._forks.children_of(self.process.pid)
        return found.get(name, 0)

    def bus(self) -> tuple[str, str]:
        """Return (url, token) of the run's nats-server."""
        table = json.loads((self.folder / "runs" / "faults" / "bus.json").read_text())
        return table["url"], table["token"]

    def worker(self, name: str, *, url: str = "") -> subprocess.Popen[bytes]:
        """Start a rollout worker that joins by itself; it is never restarted."""
        own, token = self.bus()
        return subprocess.Popen(
            [*_command("rollout-worker", f"bus.url={url or own}"), "--name", name],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment() | {"ASYNCRL_BUS_TOKEN": token},
        )

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the answer of `asyncrl doctor --json`.

        A forked doctor starts sooner, so it can still notice a process that fell silent a moment ago.
        """
        if self._forks is not None:
            output = self.folder / f"doctor-{uuid.uuid4().hex}"
            words = ["doctor", "run.toml", "--json"]
            asked = self._forks.run(words, environment=_environment(), output=output, directory=self.folder)
            return asked.wait(), json.loads(output.read_text().splitlines()[-1])
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


def _command(verb: str, *overrides: str) -> list[str]:
    words = [word for item in overrides for word in ("--set", item)]
    return [sys.executable, "-m", "asyncrl", verb, "run.toml", *words]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def running(folder: Path, *overrides: str, forks: ForkServer | None = None) -> Iterator[Run]:
    """A run in ``folder``. If it has workers, it has trained five steps on entry."""
    run = Run(folder, *overrides, forks=forks)
    try:
        if "rollout.workers=0" not in overrides:
            run.wait_for_steps(5)
        yield run
    finally:
        run.end()
