"""asyncrl's own arms: the real loop (nats-server, JetStream, every actor) on the same engine and learner."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import uvloop

from asyncrl.config.run import Mode
from asyncrl.config.staleness import Discard
from asyncrl.planning.simulation import Plan
from benchmarks.arm import run_arm
from benchmarks.peers.engine import lengths_of, timing_of
from benchmarks.peers.scene import PROMPT_TOKENS, Row, Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class FullEngine(Plan):
    """A Plan whose ``rollout.max_running`` fills the engine, like the limit of every peer."""

    groups_at_once: int

    @property
    def slots(self) -> int:
        return self.groups_at_once


def run_ours(
    scene: Scene,
    *,
    mode: Mode,
    is_colocated: bool = False,
    eviction: Literal["", "wait", "drop"] = "",
    discard: Discard = "groups",
    opens: Literal["needed", "full"] = "needed",
    max_staleness: int | None = None,
) -> Row:
    """Run one arm. Colocated: both machines generate, then both train, and switching costs nothing.

    max_staleness: another bound than the scene's
    """
    machines = 2 if is_colocated else 1
    warmup = scene.warmup if mode == "async" else 2
    plan = FullEngine(
        mode=mode,
        workers=machines,
        learner_machines=machines,
        groups_per_batch=scene.groups_per_batch,
        group_size=scene.group_size,
        max_staleness=scene.max_staleness if max_staleness is None else max_staleness,
        warmup=warmup,
        steps=warmup + scene.steps,
        seed=scene.seed,
        prompt_tokens=PROMPT_TOKENS,
        eviction=eviction,
        discard=discard,
        opens=opens,
        groups_at_once=scene.groups_at_once,
    )
    row = uvloop.run(run_arm(plan, timing=timing_of(scene), lengths=lengths_of(scene)))
    trained_groups = row["steps"] * scene.groups_per_batch
    return {
        "max_staleness": plan.bound,
        "samples_per_second": row["tokens_per_second"] / row["length_mean"],
        "tokens_per_second": row["tokens_per_second"],
        "learner_idle": row["learner_idle"],
        "learner_overhead": row["learner_overhead"],
        "engine_busy": 1 - row["rollout_idle"],
        "thrown_away_share": row["dropped_groups"] / (trained_groups + row["dropped_groups"]),
        "thrown_away_tokens_share": row["dropped_tokens"] / (row["tokens"] + row["dropped_tokens"]),
        "left_out_share": row["old_tokens"] / (row["tokens"] + row["old_tokens"]),
        "staleness_mean": row["staleness_mean"],
        "staleness_max": row["staleness_max"],
        "tokens_over_bound_share": 0.0 if row["staleness_max"] <= plan.bound else None,
        "length_mean": row["length_mean"],
        "steps": row["steps"],
        "step_seconds": row["step_seconds"],
        "cpu_share": row["cpu_share"],
        "engine_cpu_share": 0.0,
        "server_cpu_share": row["server_cpu_share"],
        "starved_share": row["starved_share"],
        "load_average": os.getloadavg()[0],
        "versions": {"asyncrl": metadata.version("asyncrl")},
        "adaptations": ["rollout.max_running fills the engine"],
    }
