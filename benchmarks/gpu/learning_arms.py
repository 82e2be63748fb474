"""The arms of learning.py, the slots they run in, and their steps as rows.

A slot has one SGLang server that stays up for successive arms. Each arm starts from the initial weights.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl import config
from asyncrl.errors import AsyncRLError
from benchmarks.gpu.arm import ArmResult, room_for_groups, run_arm, settings
from benchmarks.gpu.fleet import Fleet, FleetError, ask, has_gpu, running_and_waiting, started_bus
from benchmarks.gpu.reasoning import Exam

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The keys of the run file in which arms differ."""

    mode: str
    max_staleness: int
    correction: str = "tis_token"
    learning_rate: str = ""


ARMS: Final[Mapping[str, Way]] = {
    "sync": Way(mode="sync", max_staleness=0),
    "async-2-tis": Way(mode="async", max_staleness=2),
    "async-4-tis": Way(mode="async", max_staleness=4),
    "async-8-tis": Way(mode="async", max_staleness=8),
    "async-16-tis": Way(mode="async", max_staleness=16),
    "async-16-none": Way(mode="async", max_staleness=16, correction="none"),
    "async-4-none": Way(mode="async", max_staleness=4, correction="none"),
    "async-4-ess": Way(mode="async", max_staleness=4, learning_rate="ess_sqrt"),
    "async-0": Way(mode="async", max_staleness=0),
}
"""In the order in which they run. If time runs out, the least important arms are left out."""

RUN_FILE: Final = Path(__file__).with_name("learning.toml")

_LEAST_SECONDS: Final = 45.0
"""An arm does not start with less time left than this."""
_QUIET_SECONDS: Final = 10.0
_SPARE_STEPS: Final = 8
"""Steps of the run beyond the measured ones, so that it is ended from outside, without its final checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Parameters that all arms share.

    running   sequences that an engine may run in async arms
    settings  keys of the run file that override everything else
    exam      exam at the end of each arm
    scratch   folder for weights and the bus's store; in memory if there is room
    """

    model: Path
    data: Path
    dtype: str
    steps: int
    groups_per_batch: int
    group_size: int
    learning_rate: float
    running: int
    channel: str
    settings: Mapping[str, Any]
    exam: Exam
    out: Path
    scratch: Path

    def overrides(self, job: Job) -> dict[str, Any]:
        way = ARMS[job.arm]
        batch = self.groups_per_batch * self.group_size
        return {
            "run.mode": way.mode,
            "run.seed": job.seed,
            "run.steps": self.steps + _SPARE_STEPS,
            "model.path": self.model,
            "model.dtype": self.dtype,
            "data.path": self.data,
            "rollout.group_size": self.group_size,
            "rollout.max_running": max(batch, self.running) if way.max_staleness else batch,
            "learner.groups_per_batch": self.groups_per_batch,
            "learner.learning_rate": self.learning_rate,
            "algorithm.correction": way.correction,
            "algorithm.allow_uncorrected": way.correction == "none",
            "staleness.learning_rate": way.learning_rate,
            "staleness.max_staleness": way.max_staleness,
            "weights.channel": self.channel,
            **({"weights.options.host": "127.0.0.1"} if self.channel == "nccl" else {}),
            "weights.directory": self.scratch / "weights",
            **self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished job.

    began  Unix seconds of its first token
    exam   exam of its last weights; empty if there is none
    """

    job: Job
    slot: int
    began: float
    result: ArmResult
    exam: Row


class Slot:
    """A slot for successive arms: its own SGLang server, and the learners' GPU."""

    def __init__(
        self, number: int, *, engine_gpu: int, learner_gpu: int, scene: Scene, engine: Mapping[str, Any], stop: Stop
    ) -> None:
        self.number = number
        self._learner_gpus = (learner_gpu,) if has_gpu() else ()
        self._scene = scene
        self._stop = stop
        self._fleet = Fleet(
            scene.model,
            gpus=[engine_gpu],
            dtype=scene.dtype,
            log_dir=scene.out / f"slot{number}",
            server_arguments=engine,
        )

    def work(self, jobs: queue.SimpleQueue[Job], done: queue.SimpleQueue[Outcome | None]) -> None:
        """Work until no job is left or it is time to stop. Puts every outcome, and None at the end in any case."""
        try:
            with self._fleet:
                while self._stop.seconds_left() > _LEAST_SECONDS and (job := _next(jobs)) is not None:
                    self._fleet.reset()
                    done.put(self._run(job))
        except (AsyncRLError, FleetError, OSError) as error:
            print(f"slot {self.number} is out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            done.put(None)

    def _run(self, job: Job) -> Outcome:
        scene = self._scene
        url = self._fleet.urls[0]
        watch = _Watch(url, steps=scene.steps, stop=self._stop)
        overrides = scene.overrides(job)
        run = config.load(RUN_FILE, settings(overrides))
        room = room_for_groups(run, least_message_bytes=run.bus.max_message_bytes)
        name = f"{job.name}-slot{self.number}"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, scene.scratch / "weights" / name, ignore_errors=True)
            largest = room["bus.max_message_bytes"]
            bus = stack.enter_context(started_bus(scene.scratch / f"bus-{name}", max_message_bytes=largest))
            result = run_arm(
                [url],
                run_file=RUN_FILE,
                overrides=overrides | room,
                name=name,
                learner_gpus=self._learner_gpus,
                directory=scene.out,
                limit_seconds=self._stop.seconds_left() + 5.0,
                bus=bus,
                is_enough=watch.is_enough,
            )
        return Outcome(job=job, slot=self.number, began=watch.began, result=result, exam=self._examine(job))

    def _examine(self, job: Job) -> Row:
        """Take the exam; the server still has the weights of the last samples."""
        url = self._fleet.urls[0]
        try:
            quieten(url)
            return self._scene.exam.take(url)
        except (OSError, LookupError, TypeError, ValueError) as error:
            print(f"{job.name}: no exam: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return {}


def quieten(url: str) -> None:
    """End requests that a killed worker left on an SGLang server. Raises OSError, also if they do not end."""
    ask(url, "/continue_generation", {})
    deadline = time.monotonic() + _QUIET_SECONDS
    while True:
        ask(url, "/abort_request", {"rid": "", "abort_all": True})
        time.sleep(0.2)
        if not any(running_and_waiting(url)):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} still generates {_QUIET_SECONDS:.0f} s after everything was aborted")


class Stop:
    """When to stop: at a time, or on request."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._told = threading.Event()

    def now(self) -> None:
        self._told.set()

    def seconds_left(self) -> float:
        return 0.0 if self._told.is_set() else max(0.0, self._deadline - time.monotonic())


class _Watch:
    """Detects an arm's first token, and the end of its steps."""

    def __init__(self, url: str, *, steps: int, stop: Stop) -> None:
        self._url = url
        self._steps = steps
        self._stop = stop
        self.began = 0.0
        self._said = ""

    def is_enough(self, rows: Sequence[Row]) -> bool:
        if not self.began:
            try:
                self.began = time.time() if any(running_and_waiting(self._url)) else 0.0
            except (OSError, KeyError) as error:  # retried at the next check; else the first step counts
                self._say(f"its server does not say whether it samples: {type(error).__name__}: {error}")
        # One more step: when its batch was sampled, the engine had the weights of the last measured step.
        return len(rows) > self._steps or not self._stop.seconds_left()

    def _say(self, problem: str) -> None:
        if problem != self._said:
            print(f"{self._url}: {problem}", file=sys.stderr, flush=True)
        self._said = problem


def _next(jobs: queue.SimpleQueue[Job]) -> Job | None:
    """Return the next job; None if there is none."""
    try:
        return jobs.get_nowait()
    except queue.Empty:
        return None


# -- from outcomes to rows ---------------------------------------------------------------------------------------------

_METRICS: Final[Mapping[str, str]] = {
    "reward": "reward/mean",
    "same_in_group": "reward/same_in_group",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "dropped_groups": "staleness/dropped_groups",
    "ess": "offpolicy/ess",
    "sequence_ess": "offpolicy/sequence_ess",
    "k3": "offpolicy/k3",
    "fresh_mismatch": "mismatch/fresh_mean",
    "length_mean": "length/trained_mean",
    "truncated": "length/truncated_fraction",
    "tokens_per_second": "learner/tokens_per_second",
    "wait_seconds": "learner/wait_seconds",
    "step_seconds": "learner/step_seconds",
}


def step_rows(outcome: Outcome, *, samples_per_step: int, steps: int) -> Iterator[Row]:
    """Yield one object per step with the numbers for the plot and its explanation. Seconds exclude compilation."""
    rows = outcome.result.rows[:steps]
    began = outcome.began or (rows[0]["time"] - rows[0]["learner/step_seconds"] if rows else 0.0)
    began += compile_seconds(rows)
    for row in rows:
        yield {
            "arm": outcome.job.arm,
            "seed": outcome.job.seed,
            "step": row["step"],
            "samples": row["step"] * samples_per_step,
            "seconds": round(row["time"] - began, 3),
            **{name: _rounded(row.get(metric)) for name, metric in _METRICS.items()},
        }


def compile_seconds(rows: Sequence[Row]) -> float:
    """Return the extra time of the first step over the median one, to compile kernels or read them from a cache."""
    steps = [float(row["learner/step_seconds"]) for row in rows]
    return max(0.0, steps[0] - statistics.median(steps)) if steps else 0.0


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def broken_promises(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        bound = ARMS[outcome.job.arm].max_staleness
        worst = max((row["staleness/max"] for row in outcome.result.rows), default=0)
        if worst > bound:
            yield f"{outcome.job.name}: staleness {worst} over the bound {bound}"
