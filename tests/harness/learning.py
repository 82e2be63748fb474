"""The whole loop in one process: the demo's task with its engines and a backend, and the results of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from asyncrl import config
from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.assembly.model_servers import model_server_actor
from tests import ROOT

DEMO = ROOT / "examples" / "demo.toml"


def demo_run(folder: Path, *overrides: str) -> RunConfig:
    """Return a run of four demo steps on the reference backend; ``folder`` holds the files of data.demo_task.write."""
    return config.load(
        DEMO,
        [
            f"run.directory={folder / 'runs'}",
            "run.name=run",
            "run.steps=4",
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'prompts.jsonl'}",
            "learner.backend=reference",
            "learner.groups_per_batch=4",
            "rollout.group_size=4",
            "metrics.console=false",
            *overrides,
        ],
    )


async def train(run: RunConfig, bus: Bus, *, workers: int = 1, resume: bool = False) -> list[dict[str, Any]]:
    """Run to the end in this process. Return the rows of metrics.jsonl."""
    learner, helpers = await build_learner(run, bus=bus, resume=resume)
    async with asyncio.TaskGroup() as group:
        for number in range(workers):
            worker, *followers = await build_worker(run, bus=bus, name=f"w{number}")
            group.create_task(supervise(worker, *followers, HeartbeatSender(worker)))
        servers = [model_server_actor(run, name, bus=bus) for name in run.started_servers]
        await supervise(learner, *helpers, *servers, HeartbeatSender(learner))
    return [json.loads(line) for line in (run.run_directory / "metrics.jsonl").read_text().splitlines()]


def memory_bus() -> MemoryBus:
    return MemoryBus(max_prompts=256, max_log_bytes=2**26, ack_seconds=60.0, max_message_bytes=2**23)


def weights(run: RunConfig, version: int, *, epoch: int = 0) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run.weights_directory / f"{epoch}-{version}" / "model.safetensors")


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether both are equal to the last bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
