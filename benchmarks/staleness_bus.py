"""staleness.py through the real loop: nats-server, every actor, weights by files, and the lag forced.

    python -m benchmarks.staleness_bus                                           ... minutes on two cores
    python -m benchmarks.staleness_bus --arms sync,none,tis_token --seeds 1      one seed of the promise
    python -m benchmarks.staleness_bus --json docs/results/staleness_bus.jsonl   one object a line, for plot_staleness.py
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl import app, config
from asyncrl.actors.base import Heart
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config import Mode, RunConfig
from benchmarks import staleness_task, tiny_model
from benchmarks.staleness import GROUP_SIZE, GROUPS, HIGH
from benchmarks.staleness_task import LENGTH

Row = dict[str, Any]

LAG: Final = 16
WORKERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """delay: versions that weights come late;  engine, backend: their options"""

    name: str
    mode: Mode = "async"
    correction: str = "none"
    max_staleness: int = LAG
    delay: int = LAG
    engine: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)


ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm(name="sync", mode="sync", max_staleness=0, delay=0),
        Arm(name="none"),
        Arm(name="tis_token", correction="tis_token"),
        Arm(name="tis_token_free", correction="tis_token", delay=0),
        Arm(name="recomputed", correction="tis_token", backend={"behavior": "recomputed"}),
        Arm(name="shuffled", correction="tis_token", engine={"behavior": "shuffled"}),
        Arm(name="shifted", correction="tis_token", engine={"behavior": "shifted"}),
    )
}


def run_file(arm: Arm, folder: Path, *, seed: int, steps: int, learning_rate: float) -> RunConfig:
    return RunConfig(
        run=config.Run(name=arm.name, directory=str(folder / "runs"), seed=seed, steps=steps, mode=arm.mode),
        model=config.Model(path=str(folder / "model")),
        data=config.Data(path=str(folder / "prompts.jsonl")),
        rollout=config.Rollout(
            group_size=GROUP_SIZE, max_new_tokens=LENGTH, max_running=GROUPS * GROUP_SIZE // WORKERS
        ),
        engine=config.Engine(kind="benchmarks.tiny_engine:TinyEngine", device="cpu", options=arm.engine),
        reward=config.RewardSection(kind="benchmarks.tiny_model:reward"),
        learner=config.Learner(
            backend="benchmarks.tiny_backend:TinyBackend",
            device="cpu",
            groups_per_batch=GROUPS,
            learning_rate=learning_rate,
            options=arm.backend,
        ),
        algorithm=config.Algorithm(name="grpo", correction=arm.correction, allow_uncorrected=True),
        staleness=config.Staleness(max_staleness=arm.max_staleness),
        weights=config.Weights(channel="benchmarks.delayed_channel:DelayedChannel", keep=arm.delay + 2),
        checkpoint=config.Checkpoint(every_steps=0),
        metrics=config.Metrics(console=False, mismatch_alarm=0.0),
    )


async def train(run: RunConfig, server: EmbeddedServer) -> list[Row]:
    """The run to its end, every process of it a task of this one; what its learner reported of each step."""
    run = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
    async with asyncio.TaskGroup() as group:
        for number in range(WORKERS):
            group.create_task(_worker(run, name=f"worker-{number}", token=server.token))
        await _learner(run, token=server.token)
    return [json.loads(line) for line in (run.run_directory / "metrics.jsonl").read_text().splitlines()]


async def _learner(run: RunConfig, *, token: str) -> None:
    bus = await app.connect(run, token=token)
    try:
        learner, helpers = await app.build_learner(run, bus=bus, resume=False)
        await supervise(learner, *helpers, Heart(learner))
    finally:
        await bus.close()


async def _worker(run: RunConfig, *, name: str, token: str) -> None:
    bus = await app.connect(run, token=token)
    try:
        worker, follower = await app.build_worker(run, bus=bus, name=name)
        await supervise(worker, follower, Heart(worker))
    finally:
        await bus.close()


if __name__ == "__main__":
    import sys, cProfile
    logging.basicConfig(level="WARNING")
    torch.set_num_threads(1)
    t=time.monotonic()
    start = staleness_task.warm_start(0, reward=0.105, noise=0.25)
    print("warm", time.monotonic()-t)
    for name in sys.argv[2].split(","):
        with tempfile.TemporaryDirectory() as d:
            tiny_model.write(Path(d), start)
            s = EmbeddedServer(Path(d)/"bus"); s.start()
            t=time.monotonic(); c=time.process_time()
            import uvloop; pr=cProfile.Profile();  rows = uvloop.run(train(run_file(ARMS[name], Path(d), seed=0, steps=int(sys.argv[1]), learning_rate=HIGH), s));  import pstats; 
            print(name, time.monotonic()-t, time.process_time()-c, "J", [round(r["reward/expected"],3) for r in rows][9::20], "lags", [r["staleness/mean"] for r in rows][::9], "min", [next(i for i,c in enumerate(r["staleness/histogram"]["counts"]) if c) for r in rows][::9], max(r["staleness/max"] for r in rows), "skew", max(r["offpolicy/ess"] for r in rows), rows[-1]["bus/prompts"], "dropped", rows[-1]["staleness/dropped_groups"], "step", sum(r["learner/step_seconds"] for r in rows)/len(rows), "pub", sum(r["weights/publish_seconds"] for r in rows)/len(rows), "wait", sum(r["learner/wait_seconds"] for r in rows)/len(rows))
            s.stop()
