"""The loop learns, on real parts: a model that samples, a backend that trains it, weights that travel by files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl import app, config
from asyncrl.actors.base import Heart
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.memory import MemoryBus
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.protocols import Bus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def base(tmp_path: Path) -> RunConfig:
    """The demo's task on the reference backend."""
    demo_task.write(tmp_path)
    made = config.load(Path(__file__).parent.parent / "examples" / "demo.toml")
    return dataclasses.replace(
        made,
        run=dataclasses.replace(made.run, directory=str(tmp_path / "runs"), name="run", steps=4),
        model=dataclasses.replace(made.model, path=str(tmp_path / "model")),
        data=dataclasses.replace(made.data, path=str(tmp_path / "prompts.jsonl")),
        learner=dataclasses.replace(made.learner, backend="reference", groups_per_batch=4),
        rollout=dataclasses.replace(made.rollout, group_size=4),
        metrics=dataclasses.replace(made.metrics, console=False),
    )


def changed(run: RunConfig, section: str, **values: Any) -> RunConfig:
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **values)})


async def train(run: RunConfig, bus: Bus, *, workers: int = 1) -> list[dict[str, Any]]:
    """Run to the end in this process; the rows of metrics.jsonl."""
    learner, helpers = await app.build_learner(run, bus=bus, resume=False)
    async with asyncio.TaskGroup() as group:
        for number in range(workers):
            worker, follower = await app.build_worker(run, bus=bus, name=f"w{number}")
            group.create_task(supervise(worker, follower, Heart(worker)))
        await supervise(learner, *helpers, Heart(learner))
    return [json.loads(line) for line in (run.run_directory / "metrics.jsonl").read_text().splitlines()]


def memory_bus() -> MemoryBus:
    return MemoryBus(max_prompts=256, max_log_bytes=2**26, ack_seconds=60.0, max_message_bytes=2**23)


def weights(run: RunConfig, version: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run.weights_directory / f"0-{version}" / "model.safetensors")


async def test_async_without_staleness_is_sync_to_the_last_bit(base: RunConfig) -> None:
    one = changed(base, "engine", options={"max_batch_size": 1, "threads": 1})
    sync = changed(changed(one, "run", mode="sync", name="sync"), "weights", keep=8)
    none = changed(
        changed(changed(one, "run", mode="async", name="async"), "weights", keep=8), "staleness", max_staleness=0
    )
    rows = [await train(run, memory_bus()) for run in (sync, none)]
    assert len(rows[0]) == len(rows[1]) == 4
    for a, b in zip(*rows, strict=True):
        assert [a[name] for name in ("loss", "grad_norm", "reward/mean")] == [
            b[name] for name in ("loss", "grad_norm", "reward/mean")
        ]
    assert rows[0][-1]["loss"] != rows[0][0]["loss"]
    for version in range(1, 5):
        first, second = weights(sync, version), weights(none, version)
        assert all(torch.equal(first[name], second[name]) for name in first)


GOLDEN_LOSSES = [-0.09403118, -0.00980402, -0.02196324, -0.07599314]


async def test_losses_are_what_they_were(base: RunConfig) -> None:
    """Numbers of a synchronous run, to rounding: a change that must not change results keeps them."""
    run = changed(changed(base, "run", mode="sync"), "engine", options={"max_batch_size": 1, "threads": 1})
    rows = await train(run, memory_bus())
    assert [row["loss"] for row in rows] == pytest.approx(GOLDEN_LOSSES, abs=1e-4)


async def test_the_reward_rises_over_a_real_bus(base: RunConfig, connect: Any, nats_server: Any) -> None:
    """Two workers, staleness up to 4, JetStream: the asynchronous loop learns."""
    run = changed(changed(base, "run", steps=40), "learner", groups_per_batch=16)
    run = changed(run, "rollout", group_size=8)
    bus = await connect(nats_server, max_prompts=run.window, max_log_bytes=2**26)
    rows = await train(run, bus, workers=2)
    assert rows[0]["reward/mean"] < 0.2
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.6
    assert max(row["staleness/max"] for row in rows) <= run.max_staleness
    assert max(row["mismatch/fresh_mean"] for row in rows if "mismatch/fresh_mean" in row) < 1e-3
