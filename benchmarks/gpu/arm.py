"""One arm of a comparison: the real learner and rollout workers as processes, on servers that are there already.

The learner may be started early, while another arm is measured: without workers it has nothing to train and waits.
However an arm ends, it is a result with its problem in words, and its processes are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl import os_process
from asyncrl.run.keys.worker_keys import WORKER_KEY_VARIABLE

Row = dict[str, Any]
Ended = Literal["done", "enough", "limit", "failed"]

REPOSITORY: Final = Path(__file__).resolve().parents[2]

_LOOK_SECONDS: Final = 0.1
_FAREWELL_SECONDS: Final = 3.0
"""For workers to notice that the run is finished."""
_TRANSFER_SECONDS: Final = 1.0
"""For an engine to get the rest of what the learner sends: killed in between, it would wait for ever."""
_TAIL_LINES: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class BusAddress:
    url: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """rows: of metrics.jsonl. ended: how. problem: why the arm says nothing; empty when it does.

    seconds is from the start of the workers, exit_code the learner's, None when we ended it.
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
    """A whole run, one rollout worker for each of ``fleet_urls``. Its files are in DIRECTORY/NAME. See Arm."""
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
    """One run as processes: its learner, and a rollout worker for each server.

    overrides     keys of the run file, such as {"run.mode": "sync"}; run.name, run.directory, bus.* and the engine's
                  address are set here
    learner_gpus  which the learner sees; none leaves them as they are
    extra_env     for learner and workers
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
            WORKER_KEY_VARIABLE: "",  # a worker's name is what we call it
            os_process.PARENT: str(os.getpid()),  # they end with us
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
        """Early, if the learner's start should not count; ``run`` starts it otherwise."""
        if not self._learner.is_started:
            self._learner.start()

    def run(self, *, limit_seconds: float, is_enough: Callable[[list[Row]], bool] | None = None) -> ArmResult:
        """Until the learner ends, ``is_enough(rows)``, or the limit. Prints the ends of the logs when it failed."""
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
        """End every process of the arm. Workers go first: without them the learner begins no transfer of weights."""
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
        """Why it does not start; empty when it does."""
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
                # Code 0 is a finished run's, and the learner ends a moment later.
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
    """One asyncrl command in a process group of its own, its output in a file."""

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
                cwd=REPOSITORY,  # plugins of benchmarks.gpu are found from here
                start_new_session=True,
            )

    def kill(self) -> None:
        """The whole process group: ranks of a learner too."""
        if self._process is None or self._is_over:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._is_over = True  # its number may be another's from now on

    def obituary(self) -> str:
        """How it ended, and the last it said."""
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
    """The whole lines of metrics.jsonl so far."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def settings(overrides: Mapping[str, object]) -> list[str]:
    """As asyncrl.config.load takes them."""
    return [f"{key}={_toml(value)}" for key, value in overrides.items()]


def override_words(overrides: Mapping[str, object]) -> list[str]:
    """``--set`` options of the asyncrl commands."""
    return [word for item in settings(overrides) for word in ("--set", item)]


def visible_devices(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, counted among those that are visible to us."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = ours.split(",") if ours else []
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def tail(path: Path) -> str:
    """The last lines of a log, for a person."""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"-- {path}", *lines])


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
