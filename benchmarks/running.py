"""A run of real processes on the demo's task, heard over its bus: what tests and benchmarks of fleets share."""

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
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from asyncrl import app, config, processes
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import AsyncRLError
from asyncrl.messages import Event
from asyncrl.topics import EVENTS

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
kind = "inprocess"
options = {threads = 1}
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
_END_WITH_US = functools.partial(processes.signal_on_parent_death, signal.SIGKILL)
"""However we end; start them from a thread that lives as long."""


class Running:
    """`asyncrl run` in a folder of its own, and the events that its bus carries.

    url, token  of a server that is there; without, the run starts its own
    """

    def __init__(self, folder: Path, *overrides: str, name: str = "fleet", url: str = "", token: str = "") -> None:
        self.folder = folder.absolute()
        if not (self.folder / "run.toml").exists():
            demo_task.write(self.folder)
            (self.folder / "run.toml").write_text(RUN_FILE)
        self.overrides = [f"run.name={name}", *([f"bus.url={url}"] if url else []), *overrides]
        self.token = token
        self.events: list[Event] = []
        self._output = self.folder / f"{name}.txt"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def run_directory(self) -> Path:
        return self.folder / self.config().run_directory

    def config(self) -> RunConfig:
        return config.load(self.folder / "run.toml", [*self.overrides, f"run.directory={self.folder / 'runs'}"])

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def steps(self) -> int:
        """Trained so far."""
        metrics = self.run_directory / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        whole = [line for line in lines[-2:] if line.endswith("\n")]  # the last may be in the middle of being written
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
        with self._output.open("ab") as output:
            command = self.command("run", "run.toml", *self._sets(), *arguments)
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, env=self._env(), preexec_fn=_END_WITH_US
            )

    def scale(self, count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command("scale", "run.toml", "--rollout-workers", str(count), *self._sets(), *arguments)
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, env=self._env(), check=False, timeout=300
        )

    def join(self, name: str, *, folder: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
        """A worker that knows the bus and the run's name, and nothing of the run's folder."""
        url, token = app.bus_address(self.config(), token=self.token)
        command = self.command("rollout-worker", "--join", url, "--run", self.config().run.name, "--name", name)
        environment = self._env() | {"ASYNCRL_BUS_TOKEN": token}
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr, preexec_fn=_END_WITH_US)

    def audit(self) -> dict[str, Any]:
        """What `asyncrl audit --json` says; its exit code under "code"."""
        done = subprocess.run(
            self.command("audit", str(self.run_directory), "--json"),
            capture_output=True,
            text=True,
            env=self._env(),
            check=False,
            timeout=300,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"code": done.returncode}

    def drain(self, seconds: float = 120.0) -> int:
        """Ctrl-C; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(seconds)

    def wait(self, seconds: float = 300.0) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.asynccontextmanager
    async def heard(self) -> AsyncIterator[None]:
        """While this is open, ``events`` has what was said on the bus from its first event on."""
        task = asyncio.create_task(self._hear())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, condition: Callable[[], object], what: str, *, seconds: float = 120.0) -> None:
        """Raises TimeoutError, with all that the run said."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or (self._process is not None and self._process.poll() is not None):
                raise TimeoutError(f"{what}: did not come\n{self.said}")
            await asyncio.sleep(0.02)

    def event(self, kind: str, worker: str) -> Event | None:
        """The newest event of this kind that a worker sent or that is about it."""
        found = [one for one in self.events if one.kind == kind and worker in (one.actor, one.data.get("worker"))]
        return found[-1] if found else None

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(AsyncRLError, OSError, ValueError):  # not up yet
                bus = await app.observe(self.config(), token=self.token)
                try:
                    async with bus.read(EVENTS) as records:
                        self.events = []
                        async for record in records:
                            self.events += [record.message] if record.message is not None else []
                finally:
                    await bus.close()
            await asyncio.sleep(0.1)

    def _sets(self) -> list[str]:
        return [word for item in self.overrides for word in ("--set", item)]

    def _env(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1"} | ({"ASYNCRL_BUS_TOKEN": self.token} if self.token else {})

    @staticmethod
    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "asyncrl", *words]
