"""Collects one step's numbers: the learner's measurements, the state of the bus, and the workers' heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.actors.activity import ActivityBetweenSteps
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.live_workers import LARGE_FLEET
from asyncrl.actors.learner.sample_recorder import SampleWriter
from asyncrl.actors.learner.timeline import Timeline
from asyncrl.bus.port import Bus
from asyncrl.errors import MessageTooLarge
from asyncrl.messages import Heartbeat, StepMetrics
from asyncrl.messages.topics import EVALUATION_METRICS, METRICS, PROMPTS, TRAJECTORIES
from asyncrl.metrics.alarms import Alarm
from asyncrl.metrics.background import BackgroundSink
from asyncrl.metrics.port import ShowsSamples, Sink, TakesAlarms
from asyncrl.policies.batching.categories import MOST, Categories
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.metric import Histogram, Metric, histogram

log = logging.getLogger("asyncrl.learner")

REJECTED = "bus/rejected"
LEFT_OUT = "metrics/left_out"
OWN_NAME = re.compile("w[0-9]+")
"""Names of rollout workers started by `asyncrl run`. Names of joined workers contain digits of their keys."""
MANY_ROWS = 32
"""With fewer rows, the number of skipped rows says little."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """What a run's cost is counted with: GPUs of a rollout worker and of the learner; 1 for a process without any.

    of_pools  workers of rollout.pools, by name
    of_servers  all servers that the run starts
    are_shared  learner and engines take turns on the same GPUs; workers of pools have their own
    """

    of_worker: int
    of_learner: int
    of_pools: Mapping[str, int] = field(default_factory=dict)
    of_servers: int = 0
    are_shared: bool = False


class MetricsReporter:
    """Writes to every sink. metrics.jsonl is waited for; what is only for looking never ends a run."""

    def __init__(
        self,
        bus: Bus,
        sinks: Sequence[Sink],
        *,
        alarms: Sequence[Alarm] = (),
        has_behavior: bool = True,
        has_reward: bool = True,
        samples: Sequence[SampleWriter] = (),
        hooks: Hooks | None = None,
        timeline: Timeline | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """has_behavior: False if no policy sampled the answers;  has_reward: False if nothing judges them
        samples: writers whose groups go to sinks that show samples, stopped with the reporter
        timeline: None records none;  gpus: None reports no cost"""
        self._bus = bus
        self._sinks = sinks
        self._alarms = alarms
        self._samples = samples
        self._timeline = timeline
        self._hooks = hooks or Hooks()
        self._gpus = gpus
        self._is_cut = False  # whether a row was too large for the bus
        self.newest = StepMetrics(step=0)
        """Metrics of the last reported step."""
        self.newest_evaluation = StepMetrics(step=0)
        self.rang: dict[str, int] = {}
        """Name of an alarm -> the last step at which it was on."""
        self._activity = ActivityBetweenSteps()
        self._categories = Categories()
        self._left_out = () if has_behavior else _OF_BEHAVIOR
        self._left_out += () if has_reward else _OF_REWARD

    async def report(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        *,
        workers: Sequence[Heartbeat],
        cursor: int,
        disk: Disk,
        groups: Sequence[BufferedGroup] = (),
    ) -> None:
        """workers: their newest heartbeats;  cursor: the last log sequence read;  disk: waits if a sink's disk is full
        groups: the step's groups"""
        row = {name: value for name, value in metrics.items() if not name.startswith(self._left_out)}
        row = self._join_rare_categories(row, step=step)
        workers = self._activity.update(workers)
        row |= await self._bus_metrics(cursor) | worker_metrics(workers, step)  # alarms need these
        if self._gpus is not None:
            row |= cost_metrics(row, gpus=self._gpus, workers=[beat.actor for beat in workers])
        rung = []
        for alarm in self._alarms:
            was_on = alarm.is_on
            row |= alarm.update(row)
            rung += [alarm] if alarm.is_on and not was_on else []
        row |= self.alarms()
        self.rang |= {alarm.name: step for alarm in self._alarms if alarm.is_on}
        row[REJECTED] = self._bus.rejections.total + sum(beat.numbers.get(REJECTED, 0.0) for beat in workers)
        if slow := [sink for sink in self._sinks if isinstance(sink, BackgroundSink)]:
            row[LEFT_OUT] = float(sum(sink.num_left_out for sink in slow))
        row = dict(self._hooks.row(step, row))
        for sink in self._sinks:
            await disk.write(functools.partial(_write, sink, step, row), what="metrics")
        if self._timeline is not None:
            await self._timeline.record(step, row, groups, workers)
        self._show(step, rung)
        self.newest = step_metrics(step, row)
        await self._put(self.newest)

    def _join_rare_categories(self, row: Mapping[str, Metric], *, step: int) -> dict[str, Metric]:
        had_joined = self._categories.has_joined
        joined = self._categories.join_rest(row)
        if self._categories.has_joined and not had_joined:
            log.warning(
                "step %d: the reward has named more than %d categories; further ones are counted together, as "
                "reward/category/other. Let it name kinds of answers, not texts such as str(error)",
                step,
                MOST,
            )
        return joined

    def _show(self, step: int, rung: Sequence[Alarm]) -> None:
        """Serve sinks that want more than numbers. ``rung``: alarms that went on."""
        samples = [sample for writer in self._samples for sample in writer.take()]
        for sink in self._sinks:
            if samples and isinstance(sink, ShowsSamples):
                sink.write_samples(step, samples)
            if isinstance(sink, TakesAlarms):
                for alarm in rung:
                    sink.alarm(step, alarm.name, alarm.text)

    async def report_evaluation(self, step: int, metrics: Mapping[str, Metric], *, disk: Disk) -> None:
        """Report the evaluation of the version that ``step`` made, which may be some steps ago."""
        for writer in self._samples:
            await writer.flush()  # a sink shows the answers next to the numbers
        self._show(step, ())
        for sink in self._sinks:
            await disk.write(functools.partial(_write, sink, step, metrics), what="metrics")
        self.newest_evaluation = step_metrics(step, metrics)
        await self._put(self.newest_evaluation, key=EVALUATION_METRICS)

    async def _put(self, row: StepMetrics, *, key: str = "") -> None:
        """Show a row to observers. A row over the bus's limit goes without the numbers with the longest names."""
        numbers = sorted(row.numbers.items(), key=lambda item: len(item[0]))
        while True:
            try:
                return await self._bus.put(METRICS, replace(row, numbers=dict(numbers)), key=key)
            except MessageTooLarge:
                if not numbers:
                    return None
                numbers = numbers[: len(numbers) // 2]
                if not self._is_cut:
                    log.warning(
                        "metrics: the %d numbers of step %d are larger than bus.max_message_bytes: `asyncrl top` and "
                        "board show those with short names, metrics.jsonl has all",
                        len(row.numbers),
                        row.step,
                    )
                self._is_cut = True

    def alarms(self) -> dict[str, float]:
        """Return {alarm/NAME: 1} for alarms that are on, for a heartbeat."""
        return {f"alarm/{alarm.name}": 1.0 for alarm in self._alarms if alarm.is_on}

    async def _bus_metrics(self, cursor: int) -> dict[str, Metric]:
        return {
            "bus/prompts": float(await self._bus.depth(PROMPTS)),
            "bus/trajectories": float(await self._bus.depth(TRAJECTORIES)),
            "bus/lag": float(max(0, await self._bus.last_sequence(TRAJECTORIES) - cursor)),
        }

    async def close(self) -> None:
        """Send out the last samples and close all sinks in parallel. Raises the first error."""
        problems: list[Exception] = []
        for writer in self._samples:
            await writer.stop()
        with _collect_error(problems):
            self._show(self.newest.step, ())

        def close(sink: Sink) -> None:
            with _collect_error(problems):
                sink.close()

        await asyncio.gather(*(asyncio.to_thread(close, sink) for sink in self._sinks))
        if problems:
            raise problems[0]


@contextlib.contextmanager
def _collect_error(problems: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(error)


async def _write(sink: Sink, step: int, row: Mapping[str, Metric]) -> None:
    sink.write(step, row)


def step_metrics(step: int, row: Mapping[str, Metric]) -> StepMetrics:
    """Return the finite numbers of a row, for observers on the bus."""
    finite = {name: value for name, value in row.items() if not isinstance(value, Histogram) and math.isfinite(value)}
    histogram = row.get("staleness/histogram")
    return StepMetrics(
        step=step,
        numbers={name: float(value) for name, value in finite.items()},
        staleness=histogram.counts if isinstance(histogram, Histogram) else (),
    )


def cost_metrics(row: Mapping[str, Metric], *, gpus: Gpus, workers: Sequence[str]) -> dict[str, Metric]:
    """Return what the time since the last step cost, in all and per trained token.  workers: names of live ones"""
    elapsed, tokens = row.get("learner/elapsed_seconds"), row.get("length/trained_tokens")
    if not isinstance(elapsed, float | int):
        return {}
    of_workers = sum(gpus.of_worker for name in workers if name not in gpus.of_pools)
    apart = gpus.of_servers + sum(gpus.of_pools[name] for name in workers if name in gpus.of_pools)
    held = max(of_workers, gpus.of_learner) if gpus.are_shared else of_workers + gpus.of_learner
    spent = elapsed * (held + apart)
    metrics: dict[str, Metric] = {"cost/gpu_seconds": spent}
    if isinstance(tokens, float | int) and tokens:
        metrics["cost/gpu_seconds_per_token"] = spent / tokens
    return metrics


def table_metrics(table: GroupTable, *, now: float) -> dict[str, Metric]:
    """Return the group table's metrics after a step. ``now``: on the clock of ``BufferedGroup.arrived``."""
    generated, dropped = table.take_lengths()
    buffered = table.buffered.values()
    metrics: dict[str, Metric] = {
        "staleness/dropped_groups": float(table.counts["dropped"]),
        "staleness/failed_groups": float(table.counts["failed"]),
        "staleness/filtered_groups": float(table.counts["filtered"]),
        "buffer/groups": float(len(buffered)),
        "buffer/tokens": float(sum(one.num_tokens for one in buffered)),
        "buffer/oldest_seconds": max((now - one.arrived for one in buffered), default=0.0),
        "data/overlong_prompts": float(table.overlong),
        "learner/incarnation": float(table.incarnation),
        "length/generated": histogram(generated),
        "length/dropped": histogram(dropped),
        "weights/version": float(table.policy_version),
    }
    if table.window:
        metrics["staleness/window"] = float(table.window)
    if dropped:
        metrics["length/dropped_mean"] = sum(dropped) / len(dropped)
    return metrics


def table_numbers(table: GroupTable) -> dict[str, float]:
    """Return the group table's numbers on the run's health, for a heartbeat."""
    has_many = table.position >= MANY_ROWS
    return {
        "learner/failed_in_a_row": table.failed_in_a_row,
        "learner/dropped_since_step": table.lost_since_step("dropped"),
        "learner/filtered_since_step": table.lost_since_step("filtered"),
        "data/overlong_share": table.overlong / table.position if has_many else 0.0,
    }


def worker_metrics(workers: Sequence[Heartbeat], policy_version: int) -> dict[str, Metric]:
    """Return the rollout/* and weights/* metrics over workers, and per worker unless the fleet is large."""
    has_each = len(workers) <= LARGE_FLEET
    joined = sum(OWN_NAME.fullmatch(beat.actor) is None for beat in workers)
    metrics: dict[str, Metric] = {"rollout/workers": float(len(workers)), "rollout/joined": float(joined)}
    columns: dict[str, list[float]] = {}
    for beat in sorted(workers, key=lambda beat: beat.actor):
        lag = float(max(0, policy_version - beat.policy_version))
        numbers = dict(beat.numbers) | {"weights/lag_versions": lag}
        for name in _PER_WORKER:
            if name in numbers:
                section, _, quantity = name.partition("/")
                if has_each:
                    metrics[f"{section}/{beat.actor}/{quantity}"] = numbers[name]
                columns.setdefault(name, []).append(numbers[name])
        if has_each:
            metrics[f"weights/{beat.actor}/version"] = float(beat.policy_version)
    for name, how in _PER_WORKER.items():
        if name in columns:
            values = columns[name]
            metrics[name] = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[how]
    return metrics


_OF_BEHAVIOR: tuple[str, ...] = (
    *("mismatch/", "offpolicy/", "staleness/mean", "staleness/min", "staleness/max", "staleness/spread"),
    *("staleness/in_", "staleness/p", "staleness/histogram", "staleness/weight"),
)
"""Metrics that compare the trainer with the sampling policy, and its age; beginnings of their names."""
_OF_REWARD: tuple[str, ...] = ("reward/",)

_PER_WORKER = {
    "rollout/tokens_per_second": "sum",
    "rollout/idle_ratio": "mean",
    "rollout/running": "sum",
    "rollout/queued": "sum",
    "rollout/request_seconds": "mean",
    "rollout/longest_request_seconds": "max",
    "rollout/cached_prompt_ratio": "mean",
    "rollout/queue_seconds": "mean",
    "rollout/first_token_seconds": "mean",
    "rollout/draft_acceptance": "mean",
    "rollout/resumed_tokens": "sum",
    "rollout/discarded_tokens": "sum",
    "rollout/unsaved_tokens": "sum",
    "weights/pause_seconds": "max",
    "weights/lag_versions": "max",
}
