"""Run the arms of a comparison one after another on servers that stay up. A failed arm gives a row with its error."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl import config
from asyncrl.errors import AsyncRLError
from benchmarks.gpu.arm import Arm, ArmResult, room_for_groups, settings
from benchmarks.gpu.fleet import Fleet, FleetError, has_gpu, started_bus
from benchmarks.gpu.lengths import Lengths, merged, summary
from benchmarks.gpu.plans import Plan
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.rows import machine
from benchmarks.gpu.window import Row, Rule, measure

RUN_FILE: Final = Path(__file__).with_name("modes.toml")

_LEAST_SECONDS: Final = 20.0
"""An arm does not start with less of the budget left than this."""
_MESSAGE_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Parameters that all arms share.

    running   sequences of one engine in async arms
    warmup    warm-up steps; 0: the plan's
    settings  keys of the run file that override everything else
    out       folder for a folder of each arm: logs, metrics, timeline
    scratch   folder for weights and the bus's store; in memory if there is room
    """

    shape: str
    model: Path
    data: Path
    dtype: str
    lengths: Lengths
    gpus: int
    groups_per_batch: int
    group_size: int
    max_staleness: int
    running: int
    channel: str
    window_seconds: float
    warmup: int
    max_steps: int
    limit_seconds: float
    seed: int
    settings: Mapping[str, Any]
    out: Path
    scratch: Path
    command: str

    def rule(self, plan: Plan) -> Rule:
        return Rule(warmup=self.warmup or plan.warmup(self.max_staleness), seconds=self.window_seconds)

    def channel_of(self, plan: Plan) -> str:
        """Return the weight channel. Two NCCL ranks cannot share a GPU, so colocated arms use a folder in memory."""
        return "files" if plan.is_colocated else self.channel

    def overrides(self, plan: Plan) -> dict[str, Any]:
        return {
            "run.mode": plan.kind.mode,
            "run.seed": self.seed,
            "run.steps": self.rule(plan).warmup + self.max_steps,
            "model.path": self.model,
            "model.dtype": self.dtype,
            "data.path": self.data,
            "rollout.group_size": self.group_size,
            "rollout.max_new_tokens": self.lengths.maximum,
            "rollout.max_running": plan.running(self.groups_per_batch, self.group_size, of_async=self.running),
            "rollout.load": plan.kind.load,
            "learner.ranks": plan.learners,
            "learner.groups_per_batch": self.groups_per_batch,
            "staleness.max_staleness": self.max_staleness,
            "weights.channel": self.channel_of(plan),
            **({"weights.options.host": "127.0.0.1"} if self.channel_of(plan) == "nccl" else {}),
            "weights.directory": self.scratch / "weights",
            **plan.kind.settings,
            **self.settings,
        }

    def description(self, plan: Plan) -> Row:
        return {
            "arm": plan.arm,
            "mode": plan.kind.mode,
            "load": plan.kind.load or "on_demand",
            "gpus": self.gpus,
            "split": plan.split,
            "learners": plan.learners,
            "workers": plan.workers,
            "is_colocated": plan.is_colocated,
            "model": self.shape,
            "seed": self.seed,
            "channel": self.channel_of(plan),
            "max_staleness": plan.max_staleness(self.max_staleness),
            "groups_per_batch": self.groups_per_batch,
            "group_size": self.group_size,
            "running": plan.running(self.groups_per_batch, self.group_size, of_async=self.running),
            "length_mean_drawn": self.lengths.mean,
            "length_sigma": self.lengths.sigma,
            "length_max": self.lengths.maximum,
            "settings": {**plan.kind.settings, **self.settings},
            "command": self.command,
            **machine(),
        }


class Sweep:
    """A sweep over arms.

    is_prestarting  start the next arm's learner at an arm's first step. It loads its model and waits for workers, which
                    saves its start between arms. Its model must fit into memory together with the other learner's.
    """

    def __init__(self, scene: Scene, fleet: Fleet, *, gpus: Sequence[int], is_prestarting: bool) -> None:
        """gpus   GPUs of the fleet's servers, in the same order"""
        self._scene = scene
        self._fleet = fleet
        self._gpus = gpus
        self._is_prestarting = is_prestarting
        self._drawn = scene.lengths.drawn(groups=2000, group_size=scene.group_size)
        self._started = time.strftime("%H%M%S")

    def run(self, plans: Sequence[Plan], *, budget_seconds: float) -> Iterator[Row]:
        """Yield the row of each arm when it is done."""
        deadline = time.monotonic() + budget_seconds
        stage: _Stage | None = None
        following: _Stage | None = None

        def start_following() -> None:
            nonlocal following
            if self._is_prestarting and following is None and number + 1 < len(plans):
                following = self._stage(plans[number + 1], number + 1)
                following.start_learner()

        try:
            for number, plan in enumerate(plans):
                stage, following = following or self._stage(plan, number), None
                seconds = min(self._scene.limit_seconds, deadline - time.monotonic())
                if seconds < _LEAST_SECONDS:
                    yield stage.failure("not run: over the budget")
                else:
                    yield stage.row(limit_seconds=seconds, fleet=self._fleet, at_first_step=start_following)
                stage.close()
        finally:
            for left in (stage, following):
                if left is not None:
                    left.close()

    def _stage(self, plan: Plan, number: int) -> _Stage:
        urls = dict(zip(self._gpus, self._fleet.urls, strict=True))
        used = [urls[gpu] for gpu in plan.engine_gpus] if has_gpu() else list(urls.values())
        name = f"{plan.arm}-{plan.split.replace('+', '-')}-{self._started}-{number}"
        return _Stage(self._scene, plan, name=name, urls=used, drawn=self._drawn)


class _Stage:
    """One arm, from its bus to its row. The row holds any error."""

    def __init__(self, scene: Scene, plan: Plan, *, name: str, urls: Sequence[str], drawn: Any) -> None:
        self.name = name
        self._scene, self._plan, self._urls, self._drawn = scene, plan, urls, drawn
        self._stack = contextlib.ExitStack()
        self._arm: Arm | None = None
        self._problem = ""
        try:
            self._build()
        except (AsyncRLError, OSError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _build(self) -> None:
        self._overrides = self._scene.overrides(self._plan) | {"run.name": self.name}
        run = config.load(RUN_FILE, settings(self._overrides))
        room = room_for_groups(run, least_message_bytes=_MESSAGE_BYTES)
        self._overrides |= room
        self._run = config.load(RUN_FILE, settings(self._overrides))
        self._bus = self._stack.enter_context(
            started_bus(self._scene.scratch / f"bus-{self.name}", max_message_bytes=room["bus.max_message_bytes"])
        )
        self._stack.callback(shutil.rmtree, self._scene.scratch / "weights" / self.name, ignore_errors=True)
        self._arm = Arm(
            self._urls,
            run_file=RUN_FILE,
            overrides=self._overrides,
            name=self.name,
            learner_gpus=self._plan.learner_gpus if has_gpu() else (),
            directory=self._scene.out,
            bus=self._bus,
        )
        self._stack.callback(self._arm.close)

    def start_learner(self) -> None:
        if self._arm is not None:
            self._arm.start_learner()

    def close(self) -> None:
        self._stack.close()

    def failure(self, problem: str) -> Row:
        return self._scene.description(self._plan) | {"name": self.name, "error": problem}

    def row(self, *, limit_seconds: float, fleet: Fleet, at_first_step: Any) -> Row:
        if self._arm is None:
            return self.failure(self._problem)
        rule = self._scene.rule(self._plan)

        def is_enough(rows: list[Row]) -> bool:
            if rows:
                at_first_step()
            return rule.is_enough(rows)

        try:
            fleet.reset()
        except FleetError as error:
            return self.failure(str(error))
        timeline = self._arm.directory / "timeline.jsonl"
        with Recorder(self._urls, bus=self._bus, run=self._run, path=timeline) as recorder:
            result = self._arm.run(limit_seconds=limit_seconds, is_enough=is_enough)
        if result.problem:
            return self.failure(result.problem)
        try:
            measured = measure(result.rows, recorder.samples, warmup=rule.warmup)
        except (ValueError, KeyError) as error:
            return self.failure(f"{type(error).__name__}: {error} in {result.seconds:.0f} s")
        self._keep(timeline, result)
        return {
            **self._scene.description(self._plan),
            "name": self.name,
            **measured,
            **self._lengths(result.rows[rule.warmup :]),
            "warmup_steps": rule.warmup,
            "arm_seconds": result.seconds,
            "ended": result.ended,
        }

    def _lengths(self, steps: Sequence[Row]) -> Row:
        found: Row = {}
        for kind in ("generated", "trained", "dropped"):
            counts = merged([step[f"length/{kind}"] for step in steps if f"length/{kind}" in step])
            found[f"lengths_{kind}"] = summary(counts, self._drawn) | {
                "octaves": {f"{edge:.0f}": count for edge, count in counts.items()}
            }
        return found

    def _keep(self, timeline: Path, result: ArmResult) -> None:
        """Append the steps and the arm's description to the samples, so that one file has everything for a plot."""
        with timeline.open("a") as file:
            for row in result.rows:
                file.write(json.dumps({"step": row}) + "\n")
            about = self._scene.description(self._plan) | {"warmup_steps": self._scene.rule(self._plan).warmup}
            file.write(json.dumps({"arm": about}) + "\n")
