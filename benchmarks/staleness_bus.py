"""Measure how staleness affects learning in the real loop with a forced lag.

    python -m benchmarks.staleness_bus                                           six minutes on two cores
    python -m benchmarks.staleness_bus --arms sync,none,tis_token --seeds 1      one seed of the promise
    python -m benchmarks.staleness_bus --json docs/results/staleness_bus.jsonl   one object a line

Each arm is a run file, and everything else is real: nats-server, JetStream, the learner, the prompt source, the buffer,
two rollout workers, weights by files. Only the model is the tiny policy of tests/harness/tiny, a plugin as engine and
as backend, so that the expected reward J is exact. Every number comes from metrics.jsonl.

A weight channel forces the lag: it announces each version LAG versions late (delayed_channel.py). A group is sampled by
weights of its own version or newer. With a full window it is trained when it is max_staleness versions old. With delay
= max_staleness = LAG, every token's lag is therefore min(step, LAG), however fast the parts are.

  sync         run.mode = "sync"
  none         no correction
  tis_token    the default correction
  recomputed   tis_token, but with the trainer's logprobs in place of the behavior logprobs, as if those were not kept
  shuffled     tis_token, but the engine reports other samples' logprobs
  shifted      tis_token, but the engine reports for each token its neighbour's logprob
  small        a bound of 1, tis_token, no delay; steps and rewards take time, and the learner waits for stragglers

Required (exit code 1 otherwise), with J the mean of the last three evaluations, over seeds:
  no token is over the bound; where the lag is forced, its mean is within 0.25 of that of min(step, LAG)
  J(tis_token) >= 0.85 J(sync); J(none), J(recomputed) <= 0.4 J(sync); J(shuffled), J(shifted) <= 0.7 J(tis_token)
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, Literal

import numpy as np
import torch
import uvloop

from asyncrl import config
from asyncrl.actors.base import HeartbeatSender
from asyncrl.adapters import registry
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import Mode, RunConfig
from asyncrl.config.staleness import StalenessSection
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.build_worker import build_worker
from benchmarks.arm import live
from benchmarks.delayed_channel import SPARE
from tests.harness.tiny import files as tiny_files
from tests.harness.tiny import task as staleness_task
from tests.harness.tiny.backend import EXPECTED_REWARD
from tests.harness.tiny.task import LENGTH, Policy

Row = dict[str, Any]

HIGH: Final = 8e-3
"""Learning rate at which uncorrected stale data collapses."""
EVALUATE_EVERY: Final = 10
GROUPS: Final = 16
GROUP_SIZE: Final = 8
LAG: Final = 16
WORKERS: Final = 2
STEP_SECONDS: Final = 0.15
"""Step time of the learner in the timed arms. Longer than generating a batch, so that a window of any size fills."""
PROGRESS_SECONDS: Final = 15.0
REWARD_SECONDS: Final = 0.15
"""Mean time of a group's rewards in the timed arms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """
    delay                    versions by which weights are late
    engine, backend, reward  options of each
    """

    name: str
    mode: Mode = "async"
    correction: str = "tis_token"
    max_staleness: int = LAG
    eviction: Literal["drop", "wait"] = "drop"
    delay: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)

    def run_file(self, folder: Path, *, seed: int, steps: int) -> RunConfig:
        """Return the arm as a run on the files that tiny_files wrote to ``folder``."""
        return RunConfig(
            run=config.RunSection(
                name=self.name, directory=str(folder / "runs"), seed=seed, steps=steps, mode=self.mode
            ),
            model=config.ModelSection(path=str(folder / "model")),
            data=config.DataSection(path=str(folder / "prompts.jsonl")),
            rollout=config.RolloutSection(
                group_size=GROUP_SIZE, max_new_tokens=LENGTH, max_running=GROUPS * GROUP_SIZE // WORKERS
            ),
            engine=config.EngineSection(kind="tests.harness.tiny.engine:TinyEngine", device="cpu", options=self.engine),
            reward=config.RewardSection(kind="tests.harness.tiny.reward:TinyReward", options=self.reward),
            learner=config.LearnerSection(
                backend="tests.harness.tiny.backend:TinyBackend",
                device="cpu",
                groups_per_batch=GROUPS,
                learning_rate=HIGH,
                options=self.backend,
            ),
            algorithm=config.AlgorithmSection(name="grpo", correction=self.correction, allow_uncorrected=True),
            staleness=StalenessSection(max_staleness=self.max_staleness, eviction=self.eviction),
            weights=config.WeightsSection(channel="benchmarks.delayed_channel:DelayedChannel", keep=self.delay + SPARE),
            checkpoint=config.CheckpointSection(every_steps=0),
            metrics=config.MetricsSection(console=False, mismatch_alarm=0),
        )


_TIMED: Final[Mapping[str, Any]] = {
    "eviction": "wait",
    "backend": {"step_seconds": STEP_SECONDS},
    "reward": {"seconds": REWARD_SECONDS},
}
ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm(name="sync", mode="sync", correction="none", max_staleness=0),
        Arm(name="none", correction="none", delay=LAG),
        Arm(name="tis_token", delay=LAG),
        Arm(name="recomputed", delay=LAG, backend={"behavior": "recomputed"}),
        Arm(name="shuffled", delay=LAG, engine={"behavior": "shuffled"}),
        Arm(name="shifted", delay=LAG, engine={"behavior": "shifted"}),
        Arm(name="small", max_staleness=1, **_TIMED),
    )
}


# -- one run -----------------------------------------------------------------------------------------------------------


def run(arm: Arm, *, seed: int, steps: int, within: str | None = None) -> Row:
    """Run one learning curve with its own nats-server and its own folder in ``within``."""
    torch.set_num_threads(1)
    start = _start(seed)
    with tempfile.TemporaryDirectory(prefix="asyncrl-staleness-", dir=within) as name:
        folder = Path(name)
        tiny_files.write(folder, start)
        run_config = arm.run_file(folder, seed=seed, steps=steps)
        with EmbeddedServer(folder / "bus") as server:
            uvloop.run(_run(run_config, server))
        lines = (run_config.run_directory / "metrics.jsonl").read_text().splitlines()
    first = staleness_task.expected_reward(start)
    return {"arm": arm.name, "seed": seed, **measured([json.loads(line) for line in lines], arm=arm, first=first)}


@functools.cache
def _start(seed: int) -> Policy:
    """Return the seed's warm start, the same as in staleness.py."""
    return staleness_task.warm_start(seed, reward=0.105, noise=0.25)


async def _run(run_config: RunConfig, server: EmbeddedServer) -> None:
    """Run every process of a run as one task, each with its own connection."""
    run_config = dataclasses.replace(run_config, bus=dataclasses.replace(run_config.bus, url=server.url))
    buses = [await registry.connect(run_config, token=server.token) for _ in range(WORKERS + 1)]
    learner, helpers = await build_learner(run_config, bus=buses[0], resume=False)
    lives = [[learner, *helpers, HeartbeatSender(learner)]]
    for number, bus in enumerate(buses[1:]):
        worker, *followers = await build_worker(run_config, bus=bus, name=f"worker-{number}")
        lives.append([worker, *followers, HeartbeatSender(worker)])
    try:
        await live(lives)
    finally:
        for bus in buses:
            await bus.close()


def measured(steps: Sequence[Mapping[str, Any]], *, arm: Arm, first: float) -> Row:
    """Return the learner's reports of all steps as one row.

    first  J before the first step
    """
    lags = np.array([_padded(step["staleness/histogram"]["counts"]) for step in steps])
    curve = [first, *(step[EXPECTED_REWARD] for step in steps[EVALUATE_EVERY - 1 :: EVALUATE_EVERY])]
    return {
        "learning_rate": steps[0]["learner/learning_rate"],
        "steps": len(steps),
        "max_staleness": arm.max_staleness,
        "delay": arm.delay,
        "lag_histogram": lags.sum(0).tolist(),
        "lag_mean": float(lags.sum(0) @ np.arange(LAG + 1) / lags.sum()),
        "lag_max": max(int(step["staleness/max"]) for step in steps),
        "lags": [step["staleness/mean"] for step in steps],
        "dropped_groups": int(steps[-1]["staleness/dropped_groups"]),
        "failed_groups": int(steps[-1]["staleness/failed_groups"]),
        "ess_mean": mean(step["offpolicy/sequence_ess"] for step in steps),
        "ess_min": min(step["offpolicy/sequence_ess"] for step in steps),
        "k3_mean": mean(step["offpolicy/k3"] for step in steps),
        "steps_per_second": (len(steps) - 1) / (steps[-1]["time"] - steps[0]["time"]),
        "reward": mean(curve[-3:]),
        "curve": curve,
        "seconds": [step["time"] - steps[0]["time"] for step in steps[EVALUATE_EVERY - 1 :: EVALUATE_EVERY]],
    }


def _padded(counts: Sequence[int]) -> list[int]:
    return [*counts, *[0] * (LAG + 1 - len(counts))]


# -- report ------------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Return one row per arm, over its seeds."""
    sync = [row["reward"] for row in rows if row["arm"] == "sync"]
    found = {}
    for name in ARMS:
        mine = [row for row in rows if row["arm"] == name]
        if mine:
            rewards = [row["reward"] for row in mine]
            found[name] = {
                "arm": name,
                "reward": mean(rewards),
                "reward_error": standard_error(rewards),
                "of_sync": mean(rewards) / mean(sync) if sync else float("nan"),
                **{key: mean(row[key] for row in mine) for key in ("lag_mean", "ess_mean", "k3_mean")},
                "steps": mine[0]["steps"],
                "steps_per_second": mean(row["steps_per_second"] for row in mine),
                "lag_max": max(row["lag_max"] for row in mine),
                "ess_min": min(row["ess_min"] for row in mine),
                "lost_groups": sum(row["dropped_groups"] + row["failed_groups"] for row in mine),
            }
    return found


HEAD = "arm         bound  lag mean  max  lost   J              of sync  ESS mean   min  k3 mean  steps/s"


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['arm']:11s} {ARMS[row['arm']].max_staleness:5d} {row['lag_mean']:9.2f} {row['lag_max']:4d} "
        f"{row['lost_groups']:5d}   {row['reward']:.3f} +- {row['reward_error']:.3f} {row['of_sync']:7.2f}"
        f"  {row['ess_mean']:8.2f}  {row['ess_min']:4.2f}  {row['k3_mean']:7.3f}  {row['steps_per_second']:7.1f}"
    )


def broken_promises(arms: Mapping[str, Row]) -> Iterator[str]:
    """Yield the violated requirements among those that the arms of this run can check."""
    for name, row in arms.items():
        arm = ARMS[name]
        if row["lag_max"] > arm.max_staleness:
            yield f"{name}: a token was {row['lag_max']} versions old; the bound is {arm.max_staleness}"
        forced = mean(min(step, arm.delay) for step in range(row["steps"]))
        if arm.delay and abs(row["lag_mean"] - forced) > 0.25:
            yield f"{name}: the mean lag is {row['lag_mean']:.2f}; it was to be {forced:.2f}"
    yield from _below(arms, {"tis_token": ("sync", 0.85)})
    yield from _above(arms, {"none": ("sync", 0.4), "recomputed": ("sync", 0.4)})
    yield from _above(arms, {"shuffled": ("tis_token", 0.7), "shifted": ("tis_token", 0.7)})


def _below(arms: Mapping[str, Row], floors: Mapping[str, tuple[str, float]]) -> Iterator[str]:
    for name, (other, floor) in floors.items():
        if {name, other} <= arms.keys() and arms[name]["reward"] < floor * arms[other]["reward"]:
            share = arms[name]["reward"] / arms[other]["reward"]
            yield f"{name} keeps {share:.2f} of the reward of {other}; it must keep {floor}"


def _above(arms: Mapping[str, Row], ceilings: Mapping[str, tuple[str, float]]) -> Iterator[str]:
    for name, (other, ceiling) in ceilings.items():
        if {name, other} <= arms.keys() and arms[name]["reward"] > ceiling * arms[other]["reward"]:
            share = arms[name]["reward"] / arms[other]["reward"]
            yield f"{name} keeps {share:.2f} of the reward of {other}; it must fall to {ceiling}"


def progress(within: Path, *, steps: int) -> list[str]:
    """Return the progress of the current runs, from their folders in ``within``."""
    found = sorted(within.glob("*/runs/*/metrics.jsonl"))
    return [f"{one.parent.name}: step {len(one.read_bytes().splitlines())} of {steps}" for one in found]


def measure(arms: Sequence[Arm], *, seeds: int, steps: int, workers: int) -> list[Row]:
    """Do all runs, ``workers`` at a time. Prints each finished run, and the progress every PROGRESS_SECONDS."""
    rows: list[Row] = []
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-staleness-") as within,
        ProcessPoolExecutor(max_workers=workers) as pool,
    ):
        todo = {pool.submit(run, arm, seed=seed, steps=steps, within=within) for seed in range(seeds) for arm in arms}
        count = len(todo)
        try:
            while todo:
                done, todo = wait(todo, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                for row in [future.result() for future in done]:
                    rows.append(row)
                    print(
                        f"{time.monotonic() - started:4.0f} s  {len(rows):3d}/{count}  {row['arm']:11s} "
                        f"seed {row['seed']}  lag {row['lag_mean']:5.2f}  J {row['reward']:.3f}",
                        flush=True,
                    )
                if not done:
                    far = ", ".join(progress(Path(within), steps=steps)) or "starting"
                    print(f"{time.monotonic() - started:4.0f} s  {len(rows):3d}/{count}  {far}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(rows, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"]))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness_bus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="separated by commas")
    add("--seeds", type=int, default=4)
    add("--steps", type=int, default=200)
    add("--workers", type=int, default=2, help="runs at a time, a process each")
    add("--json", type=Path, metavar="FILE", help="write the rows there, one object a line")
    options = parser.parse_args(given)
    unknown = [name for name in options.arms.split(",") if name not in ARMS]
    if unknown:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    if options.steps < 3 * EVALUATE_EVERY:
        parser.error(f"--steps must be at least {3 * EVALUATE_EVERY}: J is the mean of three evaluations")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a requirement is violated, 130 at Ctrl-C."""
    options = arguments(given)
    started = time.monotonic()
    arms = [ARMS[name] for name in options.arms.split(",")]
    try:
        rows = measure(arms, seeds=options.seeds, steps=options.steps, workers=options.workers)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    found = summary(rows)
    print("", HEAD, *map(line, found.values()), sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = list(broken_promises(found))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
