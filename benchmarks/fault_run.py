"""A run of real processes whose parts hang while a file of their name is in its folder, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
