"""A run of real processes on the demo's task, observed over its bus; shared by tests and benchmarks of fleets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl import config, os_process
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import AsyncRLError
from asyncrl.messages import Event
from asyncrl.messages.topics import EVENTS
from tests.harness.audits import audited
from tests.harness.forked import LAUNCHER, ForkedCommand, ForkServer

RUN_FILE = """
[run]
name = "fleet"
directory = "runs"
steps = 1000000
[model]
path = "model"
[data]
path = "prompts.jsonl"
[engine]
kind = "tests.chaos.metered_model:MeteredModel"
options = {threads = 1, step_seconds = 0.02, meter = "meters"}  # it leaves the cores to tests beside it
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
backend = "reference"
groups_per_batch = 8
threads = 1
[rollout]
workers = 1
group_size = 4
max_new_tokens = 8
max_running = 8
[staleness]
max_staleness = 4
[checkpoint]
every_steps = 20
[bus]
ack_seconds = 5.0
"""
WAIT_SECONDS = 240.0
"""Limit of every wait for an event of a run, which takes seconds on an idle machine."""
_END_WITH_US = functools.partial(os_process.signal_on_parent_death, signal.SIGKILL)
"""Ends the process whenever this one ends. Start the process from a thread that lives as long as this process."""


@contextlib.asynccontextmanager
async def within(what: str, *, seconds: float = WAIT_SECONDS) -> AsyncIterator[None]:
    """Raise AssertionError with ``what`` if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise AssertionError(f"not within {seconds:.0f} s: {what}") from None


class RunProcess:
    """`asyncrl run` in a folder of its own, and the events on its bus.

    url, token  of a running server; without them the run starts its own
    forks       starts its processes without imports; None: each is a new Python
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        name: str = "fleet",
        url: str = "",
        token: str = "",
        forks: ForkServer | None = None,
    ) -> None:
        self.folder = folder.absolute()
        if not (self.folder / "run.toml").exists():
            demo_task.write(self.folder)
            (self.folder / "run.toml").write_text(RUN_FILE)
        self.overrides = [f"run.name={name}", *([f"bus.url={url}"] if url else []), *overrides]
        self.token = token
        self._forks = forks
        self.events: list[Event] = []
        self._output = self.folder / f"{name}.txt"
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None

    @functools.cached_property
    def run_directory(self) -> Path:
        """Cached, because waits for a step read it fifty times a second and loading the run file dominates their
        cost."""
        return self.folder / self.config().run_directory

    def config(self) -> RunConfig:
        return config.load(self.folder / "run.toml", [*self.overrides, f"run.directory={self.folder / 'runs'}"])

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        metrics = self.run_directory / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        whole = [line for line in lines[-2:] if line.endswith("\n")]  # the last line may be incomplete
        return int(json.loads(whole[-1])["step"]) if whole else 0

    @property
    def code(self) -> int | None:
        """Its exit code; None while it is up."""
        assert self._process is not None
        return self._process.poll()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *arguments: str) -> None:
        words = (
            "run",
            "run.toml",
            *self._sets(),
            *(("--set", LAUNCHER) if self._forks is not None else ()),
            *arguments,
        )
        self._process = self._started(words, environment=self._env(), output=self._output, directory=self.folder)

    def scale(self, count: int) -> tuple[int, str]:
        """Return the exit code and the output of `asyncrl scale`."""
        output = self.folder / f"scale-{uuid.uuid4().hex}"
        output.touch()
        command = ("scale", "run.toml", "--rollout-workers", str(count), *self._sets())
        process = self._started(command, environment=self._env(), output=output, directory=self.folder)
        return process.wait(WAIT_SECONDS), output.read_text()

    def beside(self, *words: str) -> subprocess.Popen[bytes] | ForkedCommand:
        """Start another command of asyncrl. Its output is added to that of the run."""
        return self._started(words, environment=self._env(), output=self._output, directory=self.folder)

    def join(
        self, name: str, *words: str, folder: Path, verb: str = "rollout-worker"
    ) -> subprocess.Popen[bytes] | ForkedCommand:
        """Start a worker in another folder, as on another machine. It writes its output to NAME.txt in ``folder``."""
        url, token = registry.bus_address(self.config(), token=self.token)
        own = (f"bus.url={url}", f"model.path={self.folder / 'model'}", f"data.path={self.folder / 'prompts.jsonl'}")
        sets = [word for item in own for word in ("--set", item)]
        words = (verb, str(self.folder / "run.toml"), *self._sets(), *sets, "--name", name, *words)
        environment, output = self._env() | {"ASYNCRL_BUS_TOKEN": token}, folder / f"{name}.txt"
        output.touch()
        return self._started(words, environment=environment, output=output, directory=folder)

    def audit(self) -> dict[str, Any]:
        """Return the output of `asyncrl audit --json`, with its exit code under "code"."""
        return audited(self.run_directory, token=self.token)

    def drain(self, seconds: float = WAIT_SECONDS) -> int:
        """Send Ctrl-C and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(seconds)

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.asynccontextmanager
    async def heard(self) -> AsyncIterator[None]:
        """While the context is open, ``events`` holds every event on the bus, from the first on."""
        task = asyncio.create_task(self._hear())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, condition: Callable[[], object], what: str, *, seconds: float = WAIT_SECONDS) -> None:
        """Raises TimeoutError with all output of the run."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or (self._process is not None and self._process.poll() is not None):
                raise TimeoutError(f"{what}: did not come\n{self.said}")
            await asyncio.sleep(0.02)

    def event(self, kind: str, worker: str) -> Event | None:
        """Return the newest event of this kind from a worker or about it."""
        found = [one for one in self.events if one.kind == kind and worker in (one.actor, str(one.data.get("worker")))]
        return found[-1] if found else None

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(AsyncRLError, OSError, ValueError):  # not up yet
                bus = await registry.observe(self.config(), token=self.token)
                try:
                    async with bus.read(EVENTS) as records:
                        self.events = []
                        async for record in records:
                            self.events += [record.message] if record.message is not None else []
                finally:
                    await bus.close()
            await asyncio.sleep(0.1)

    def _started(
        self, words: Sequence[str], *, environment: Mapping[str, str], output: Path, directory: Path
    ) -> subprocess.Popen[bytes] | ForkedCommand:
        if self._forks is not None:
            return self._forks.run(words, environment=environment, output=output, directory=directory)
        with output.open("ab") as file:
            return subprocess.Popen(
                self.command(*words), cwd=directory, env=environment, stdout=file, stderr=file, preexec_fn=_END_WITH_US
            )

    def _sets(self) -> list[str]:
        return [word for item in self.overrides for word in ("--set", item)]

    def _env(self) -> dict[str, str]:
        forks = self._forks.environment if self._forks is not None else {}
        token = {"ASYNCRL_BUS_TOKEN": self.token} if self.token else {}
        return os.environ | {"OMP_NUM_THREADS": "1"} | forks | token

    @staticmethod
    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "asyncrl", *words]
