"""Faults injected into a run of real processes on a real nats-server: each is named, and what is ours is mended."""

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

import pytest

from asyncrl.data import demo_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMED_SECONDS = 30.0
"""Every fault is named within 10 s on a machine that is not busy with other tests; nothing may ever take longer."""

FAULTS = '''
"""Parts of a run that hang while a file is there."""
import asyncio, time
from pathlib import Path
from asyncrl.data import demo_task
from asyncrl.engines.inprocess import InProcessEngine, Options

HERE = Path(__file__).parent

def reward(sample):
    while (HERE / "reward").exists():
        time.sleep(0.05)
    return demo_task.reward(sample)

class Engine(InProcessEngine):
    async def generate(self, *arguments, **named):
        while (HERE / "engine").exists():
            await asyncio.sleep(0.05)
        return await super().generate(*arguments, **named)
'''

RUN_FILE = """
[run]
name = "faults"
directory = "runs"
steps = 1000000
[model]
path = "model"
[data]
path = "prompts.jsonl"
[engine]
kind = "faults:Engine"
options = {threads = 1}
[reward]
kind = "faults:reward"
timeout_seconds = 300
[learner]
backend = "reference"
groups_per_batch = 16
threads = 1
[rollout]
workers = 2
group_size = 4
max_new_tokens = 8
[staleness]
max_staleness = 1
[metrics]
console = false
"""


class Run:
    """`asyncrl run` in a folder, and what it says on stderr."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        words = [word for item in overrides for word in ("--set", item)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "run", "run.toml", *words],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
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
        """The line with ``text``, among those from ``after`` on."""

        def found() -> str:
            return next((line for line in self.said[after:] if text in line), "")

        with self._heard:
            assert self._heard.wait_for(found, timeout=seconds), f"{text!r} was not said:\n" + "\n".join(self.said)
            return found()

    def wait_for_steps(self, count: int) -> None:
        """Until so many more steps are trained."""
        metrics = self.folder / "runs" / "faults" / "metrics.jsonl"

        def steps() -> int:
            return len(metrics.read_text().splitlines()) if metrics.exists() else 0

        goal = steps() + count
        while steps() < goal:
            assert self.process.poll() is None, "\n".join(self.said)
            time.sleep(0.1)

    def pid(self, *words: str) -> int:
        """Of the child whose command line has these words."""
        assert (found := self.find(*words)), f"no child {words}"
        return found

    def find(self, *words: str) -> int:
        """Its process id, 0 when there is none."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and all(any(word in part for part in command) for word in words):
                    return int(name)
        return 0

    def doctor(self) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "doctor", "run.toml", "--json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "faults.py").write_text(FAULTS)
    return tmp_path


@contextlib.contextmanager
def running(folder: Path, *overrides: str) -> Iterator[Run]:
    run = Run(folder, *overrides)
    try:
        run.wait_for_steps(3)
        yield run
    finally:
        run.end()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


def test_what_hangs_or_freezes_is_named_and_its_end_is_said(folder: Path) -> None:
    with running(folder, "run.stall_seconds=3600") as run:
        faults = {
            "reward function has not returned": ("reward", hanging(folder / "reward")),
            "engine has not answered": ("engine", hanging(folder / "engine")),
            "worker w1 is stopped (SIGSTOP)": ("frozen", stopped(run.pid("rollout-worker", "w1"))),
            "learner is stopped (SIGSTOP)": ("frozen", stopped(run.pid("asyncrl", "learner"))),
            "nats-server has not answered": ("bus", stopped(run.pid("nats-server"))),
        }
        for text, (fault, injected) in faults.items():
            before = len(run.said)
            with injected:
                began = time.monotonic()
                run.wait_for(text, after=before)
                print(f"{fault:8s} named after {time.monotonic() - began:.1f} s")
                if fault in ("reward", "frozen"):
                    code, found = run.doctor()
                    assert (code, fault in [one["fault"] for one in found["findings"]]) == (1, True)
            run.wait_for(f": {fault} of", after=before)
            run.wait_for_steps(2)
        assert run.doctor()[0] == 0
        assert run.process.poll() is None


def test_a_worker_that_stays_frozen_is_started_again(folder: Path) -> None:
    with running(folder, "run.stall_seconds=7") as run:
        pid = run.pid("rollout-worker", "w0")
        with stopped(pid):
            assert "w0 ended with signal SIGKILL (worker w0 is stopped" in run.wait_for("restart 1 of 3")
        while run.find("rollout-worker", "w0") in (0, pid):
            time.sleep(0.1)
        run.wait_for_steps(2)


def test_a_learner_that_cannot_come_back_ends_the_run_with_the_reason(folder: Path) -> None:
    with running(folder, "run.stall_seconds=7", "run.restarts=0") as run, stopped(run.pid("asyncrl", "learner")):
        line = run.wait_for("ending the run")
        assert "learner is stopped (SIGSTOP)" in line
        assert run.process.wait(60) == 70
