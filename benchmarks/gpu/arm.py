"""One arm of a comparison: the real learner and rollout workers as processes, on servers that already run.

The learner may start early, while another arm is measured; without workers it has nothing to train and waits. An arm
always ends with a result, with the problem in words if there is one, and all its processes are ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl import os_process
from asyncrl.adapters import registry
from asyncrl.config import RunConfig

Row = dict[str, Any]
Ended = Literal["done", "enough", "limit", "failed"]

REPOSITORY: Final = Path(__file__).resolve().parents[2]

_LOOK_SECONDS: Final = 0.1
_FAREWELL_SECONDS: Final = 3.0
"""Time for workers to notice that the run is finished."""
_TRANSFER_SECONDS: Final = 1.0
"""Time for an engine to receive the rest of a transfer. If the learner dies in between, the engine waits forever."""
_TAIL_LINES: Final = 25
_WIDEST: Final = 64 * 2**20
"""Bytes of a message that a NATS server takes at most. Larger groups travel without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusAddress:
    url: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """The result of an arm.

    rows       rows of metrics.jsonl
    ended      how the arm ended
    problem    why the result is unusable; empty if it is usable
    seconds    time since the start of the workers
    exit_code  the learner's exit code; None if the benchmark ended it
    """

    rows: list[Row]
    ended: Ended
    seconds: float
    exit_code: int | None
    problem: str
    logs: tuple[Path, ...]


def run_arm(
    fleet_urls: Sequence[str],
    *,
    run_file: Path,
    overrides: Mapping[str, object],
    name: str,
    learner_gpus: Sequence[int],
    directory: Path,
    limit_seconds: float,
    bus: BusAddress,
    extra_env: Mapping[str, str] | None = None,
    is_enough: Callable[[list[Row]], bool] | None = None,
) -> ArmResult:
    """Do a whole run with one rollout worker for each of ``fleet_urls``. Its files are in DIRECTORY/NAME. See Arm."""
    arm = Arm(
        fleet_urls,
        run_file=run_file,
        overrides=overrides,
        name=name,
        learner_gpus=learner_gpus,
        directory=directory,
        bus=bus,
        extra_env=extra_env,
    )
    return arm.run(limit_seconds=limit_seconds, is_enough=is_enough)


class Arm:
    """One run as processes: a learner, and a rollout worker for each server.

    overrides     keys of the run file, such as {"run.mode": "sync"}; run.name, run.directory, bus.* and the engine's
                  address are set by this class
    learner_gpus  GPUs that the learner sees; empty: no restriction
    extra_env     environment variables for learner and workers
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run_file: Path,
        overrides: Mapping[str, object],
        name: str,
        learner_gpus: Sequence[int],
        directory: Path,
        bus: BusAddress,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute() / name
        fixed = {"run.name": name, "run.directory": directory.absolute(), "bus.url": bus.url, "engine.kind": "sglang"}
        common = [str(run_file.absolute()), *override_words({**overrides, **fixed})]
        environment = {
            **os.environ,
            **(extra_env or {}),
            "ASYNCRL_BUS_TOKEN": bus.token,
            os_process.PARENT: str(os.getpid()),  # they end with this process
        }
        gpus = {"CUDA_VISIBLE_DEVICES": visible_devices(learner_gpus)} if learner_gpus else {}
        self._learner = _Process(
            "learner", ["learner", *common], environment={**environment, **gpus}, directory=self.directory
        )
        self._workers = [
            _Process(
                f"w{number}",
                ["rollout-worker", *common, *override_words({"engine.options.url": url}), "--name", f"w{number}"],
                environment=environment,
                directory=self.directory,
            )
            for number, url in enumerate(urls)
        ]

    def start_learner(self) -> None:
        """Start the learner early, so that its start does not count. Otherwise ``run`` starts it."""
        if not self._learner.is_started:
            self._learner.start()

    def run(self, *, limit_seconds: float, is_enough: Callable[[list[Row]], bool] | None = None) -> ArmResult:
        """Run until the learner ends, ``is_enough(rows)``, or the limit. Prints the ends of the logs on failure."""
        began = time.monotonic()
        ended: Ended = "failed"
        try:
            problem = self._start()
            if not problem:
                ended, problem = self._watch(began + limit_seconds, is_enough or (lambda rows: False))
        finally:
            exit_code = self._learner.exit_code
            self.close(is_done=ended == "done")
        rows = read_rows(self._metrics)
        if not problem and not rows:
            ended, problem = "failed", f"no step in {limit_seconds:.0f} s"
        result = ArmResult(
            rows=rows,
            ended=ended,
            seconds=time.monotonic() - began,
            exit_code=exit_code,
            problem=problem,
            logs=tuple(log for process in self._processes for log in process.logs()),
        )
        if problem:
            print(f"{self.directory.name}: {problem}", *map(tail, result.logs), sep="\n", flush=True)
        return result

    def close(self, *, is_done: bool = False) -> None:
        """End every process of the arm. Workers end first; without them the learner starts no transfer of weights."""
        if is_done:
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while any(worker.is_alive for worker in self._workers) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        for worker in self._workers:
            worker.kill()
        if self._learner.is_alive:
            time.sleep(_TRANSFER_SECONDS)
        self._learner.kill()

    def _start(self) -> str:
        """Start the arm. Return why it does not start; empty if it does."""
        try:
            self.start_learner()
            for worker in self._workers:
                worker.start()
        except OSError as error:
            return f"could not start: {error}"
        return ""

    def _watch(self, deadline: float, is_enough: Callable[[list[Row]], bool]) -> tuple[Ended, str]:
        rows: list[Row] = []
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            rows = read_rows(self._metrics)
            code = self._learner.exit_code
            if code is not None:
                return ("done", "") if code == 0 else ("failed", self._learner.obituary())
            for worker in self._workers:
                # Code 0 means that the run is finished; the learner ends a moment later.
                if worker.exit_code not in (None, 0):
                    return "failed", worker.obituary()
            if is_enough(rows):
                return "enough", ""
        return "limit", ""

    @property
    def _metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def _processes(self) -> list[_Process]:
        return [self._learner, *self._workers]


class _Process:
    """One asyncrl command in its own process group, with its output in a file."""

    def __init__(self, name: str, words: Sequence[str], *, environment: Mapping[str, str], directory: Path) -> None:
        self.name = name
        self._words = words
        self._environment = environment
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._environment),
                cwd=REPOSITORY,  # so that plugins of benchmarks.gpu can be imported
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the whole process group, including a learner's ranks."""
        if self._process is None or self._is_over:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._is_over = True  # its pid may be reused from now on

    def obituary(self) -> str:
        """Return how the process ended, and its last output."""
        code = self.exit_code or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = self._output.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"{self.name} ended with {how}: {said}"

    @property
    def _output(self) -> Path:
        return self._directory / f"{self.name}.out"

    def logs(self) -> list[Path]:
        return [path for path in (self._output, self._directory / "logs" / f"{self.name}.log") if path.exists()]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of metrics.jsonl so far, without an incomplete line."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def settings(overrides: Mapping[str, object]) -> list[str]:
    """Return overrides in the form of asyncrl.config.load."""
    return [f"{key}={_toml(value)}" for key, value in overrides.items()]


def room_for_groups(run: RunConfig, *, least_message_bytes: int = 0) -> dict[str, int]:
    """Return overrides that give the bus room for every group of the run, with the engines' experts.

    The log is trimmed only after a checkpoint, so it must hold all of them.
    """
    wide = dataclasses.replace(run.bus, max_message_bytes=_WIDEST, max_group_bytes=2**31)
    group = registry.largest_group_bytes(dataclasses.replace(run, bus=wide))
    num_groups = run.window + run.run.steps * run.learner.groups_per_batch
    return {
        "bus.max_message_bytes": max(least_message_bytes, group),
        "bus.max_group_bytes": max(run.bus.max_group_bytes, group),
        "bus.max_log_bytes": max(2 * run.bus.max_group_bytes, num_groups * group),
    }


def override_words(overrides: Mapping[str, object]) -> list[str]:
    """Return overrides as ``--set`` options of the asyncrl commands."""
    return [word for item in settings(overrides) for word in ("--set", item)]


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs, numbered among those visible to this process."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = ours.split(",") if ours else []
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


@contextlib.contextmanager
def started(
    words: Sequence[str], output: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with ``words`` in the repository, in a session of its own, of which nothing is left afterwards.

    environment  variables besides those of this process
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=os_process.asks_for_signal_on_parent_death(signal.SIGKILL),
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(path: Path) -> str:
    """Return the last lines of a log, for display."""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"-- {path}", *lines])


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
