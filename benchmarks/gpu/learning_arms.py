"""Arms of learning.py, the slots they run in, and their steps as rows.

A slot has one SGLang server that stays up for one arm after the other, from the initial weights each.
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
from benchmarks.gpu.arm import ArmResult, run_arm, settings
from benchmarks.gpu.fleet import Fleet, FleetError, ask, has_gpu, running_and_waiting, started_bus
from benchmarks.gpu.reasoning import Exam

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What tells arms apart: keys of the run file."""

    mode: str
    max_staleness: int
    correction: str = "tis_token"
    is_adaptive: bool = False
    learning_rate: str = ""


ARMS: Final[Mapping[str, Way]] = {
    "sync": Way(mode="sync", max_staleness=0),
    "async-4-tis": Way(mode="async", max_staleness=4),
    "async-8-tis": Way(mode="async", max_staleness=8),
    "async-16-tis": Way(mode="async", max_staleness=16),
    "async-16-none": Way(mode="async", max_staleness=16, correction="none"),
    "async-4-none": Way(mode="async", max_staleness=4, correction="none"),
    "async-16-adaptive": Way(mode="async", max_staleness=16, is_adaptive=True),
    "async-4-ess": Way(mode="async", max_staleness=4, learning_rate="ess_sqrt"),
    "async-4-adaptive": Way(mode="async", max_staleness=4, is_adaptive=True),
    "async-0": Way(mode="async", max_staleness=0),
}
"""The order is the order they run in: if time runs out, what is left out matters least."""

RUN_FILE: Final = Path(__file__).with_name("learning.toml")

_LEAST_SECONDS: Final = 45.0
"""An arm with less time than this left is not started."""
_QUIET_SECONDS: Final = 10.0
_SPARE_STEPS: Final = 8
"""The run is longer than what is measured: it is ended from outside, without the checkpoint at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all arms have in common.

    running   sequences an engine may run in async arms
    settings  of the run file, over everything else
    exam      taken at the end of each arm
    scratch   weights and the bus's store; in memory if there is room
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
            "staleness.adaptive": way.is_adaptive,
            "staleness.learning_rate": way.learning_rate,
            "staleness.max_staleness": way.max_staleness,
            "weights.channel": self.channel,
            **({"weights.options.host": "127.0.0.1"} if self.channel == "nccl" else {}),
            "weights.directory": self.scratch / "weights",
            **self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished job. began: Unix seconds of its first token. exam: of its last weights, empty when it has none."""

    job: Job
    slot: int
    began: float
    result: ArmResult
    exam: Row


class Slot:
    """A place for one arm after the other: an SGLang server of its own, and the learners' GPU."""

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
        """Until no job is left or it is time to stop. Puts every outcome, and None at the end, whatever happened."""
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
        largest = max(run.bus.max_message_bytes, run.largest_group_bytes)
        # Nothing is trimmed without a checkpoint: the log must take every group the run may make.
        log_bytes = (run.window + run.run.steps * scene.groups_per_batch) * run.largest_group_bytes
        name = f"{job.name}-slot{self.number}"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, scene.scratch / "weights" / name, ignore_errors=True)
            bus = stack.enter_context(started_bus(scene.scratch / f"bus-{name}", max_message_bytes=largest))
            result = run_arm(
                [url],
                run_file=RUN_FILE,
                overrides=overrides | {"bus.max_message_bytes": largest, "bus.max_log_bytes": log_bytes},
                name=name,
                learner_gpus=self._learner_gpus,
                directory=scene.out,
                limit_seconds=self._stop.seconds_left() + 5.0,
                bus=bus,
                is_enough=watch.is_enough,
            )
        return Outcome(job=job, slot=self.number, began=watch.began, result=result, exam=self._examine(job))

    def _examine(self, job: Job) -> Row:
        """The server still has the weights that the last samples came from."""
        url = self._fleet.urls[0]
        try:
            quieten(url)
            return self._scene.exam.take(url)
        except (OSError, LookupError, TypeError, ValueError) as error:
            print(f"{job.name}: no exam: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return {}


def quieten(url: str) -> None:
    """End what a killed worker left behind on an SGLang server. Raises OSError, also when that does not help."""
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
    """When to end: at a time, or when told to."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._told = threading.Event()

    def now(self) -> None:
        self._told.set()

    def seconds_left(self) -> float:
        return 0.0 if self._told.is_set() else max(0.0, self._deadline - time.monotonic())


class _Watch:
    """Sees an arm's first token, and when it has done its steps."""

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
            except (OSError, KeyError) as error:  # asked again at the next look; without an answer: of the first step
                self._say(f"its server does not say whether it samples: {type(error).__name__}: {error}")
        # One more: when its batch was sampled, the engine had the weights of the last step that counts.
        return len(rows) > self._steps or not self._stop.seconds_left()

    def _say(self, problem: str) -> None:
        if problem != self._said:
            print(f"{self._url}: {problem}", file=sys.stderr, flush=True)
        self._said = problem


def _next(jobs: queue.SimpleQueue[Job]) -> Job | None:
    """None when no job is left."""
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
    "staleness_bound": "staleness/bound",
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
    """One object a step: what the picture needs and what explains it. Seconds leave compilation out."""
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
    """What the first step took over the median one: its kernels are compiled, or read from a cache, in each process."""
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
