"""The loop learns with real parts: a model that samples, a backend that trains it, and weights sent through files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.learner.weight_publisher import WeightPublisher
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from tests.harness.families import make_tiny_family
from tests.harness.learning import demo_run, is_same, memory_bus, train, weights

pytestmark = pytest.mark.slow


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
    return demo_run(tmp_path)


def changed(run: RunConfig, section: str, **values: Any) -> RunConfig:
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **values)})


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
        assert is_same(first, second)


GOLDEN_LOSSES = [-0.09403118, -0.00980402, -0.02196324, -0.07599314]


async def test_losses_are_what_they_were(base: RunConfig) -> None:
    """Numbers of a synchronous run, up to rounding. A change that must not affect results keeps them."""
    run = changed(changed(base, "run", mode="sync"), "engine", options={"max_batch_size": 1, "threads": 1})
    rows = await train(run, memory_bus())
    assert [row["loss"] for row in rows] == pytest.approx(GOLDEN_LOSSES, abs=1e-4)


async def test_a_new_run_exports_no_version_0_because_engines_start_with_it(
    base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a channel that sends from memory, too: the first version that moves is 1, and step 0 is sampled at once."""
    versions = []
    publish = WeightPublisher.publish

    async def record(self: WeightPublisher, snapshot: Any, **arguments: Any) -> None:
        versions.append(arguments["policy_version"])
        await publish(self, snapshot, **arguments)

    monkeypatch.setattr(WeightPublisher, "publish", record)
    run = changed(base, "weights", channel="nccl", keep=8, options={"host": "127.0.0.1"})
    rows = await train(run, memory_bus())
    assert len(rows) == 4
    assert versions == [1, 2, 3, 4]
    assert [folder.name for folder in run.weights_directory.iterdir()] == ["0-4"]  # that somebody reads


async def test_two_optimizer_steps_a_batch_make_one_version_and_the_clip_binds(base: RunConfig) -> None:
    learner = {
        "steps_per_batch": 2,
        "groups_per_batch": 4,
        "schedule": "linear",
        "min_learning_rate": 1e-3,
        "decay_steps": 0,
        "warmup_steps": 0,
    }
    run = changed(changed(base, "run", mode="sync", steps=4), "learner", **learner)
    rows = await train(run, memory_bus())
    assert [row["step"] for row in rows] == [row["weights/version"] for row in rows] == [1, 2, 3, 4]
    assert {row["staleness/max"] for row in rows} == {0}
    assert any(row["offpolicy/clip_fraction"] for row in rows)
    assert all(row["learner/forward_seconds"] > 0 and row["learner/skipped_mini_batches"] == 0 for row in rows)
    assert [row["learner/learning_rate"] for row in rows] == pytest.approx([3e-3, 2.5e-3, 2e-3, 1.5e-3])
    # relative to the sampling policy, not to that of the second step
    assert max(row["mismatch/fresh_mean"] for row in rows) < 1e-3


async def test_the_reward_rises_over_a_real_bus(base: RunConfig, connect: Any, nats_server: Any) -> None:
    """Two workers, staleness up to 4, JetStream: the asynchronous loop learns."""
    run = changed(changed(base, "run", steps=20), "learner", groups_per_batch=16, learning_rate=6e-3)
    run = changed(run, "rollout", group_size=8)
    bus = await connect(nats_server, max_prompts=run.window, max_log_bytes=2**26)
    rows = await train(run, bus, workers=2)
    assert rows[0]["reward/mean"] < 0.2
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.6
    assert max(row["staleness/max"] for row in rows) <= run.max_staleness
    assert max(row["mismatch/fresh_mean"] for row in rows if "mismatch/fresh_mean" in row) < 1e-3


@pytest.mark.parametrize(("backend", "architecture"), [("reference", "qwen3_moe"), ("megatron", "gpt_oss")])
async def test_engines_of_a_mixture_sample_from_the_weights_that_are_trained(
    tmp_path: Path, backend: str, architecture: str
) -> None:
    """Four steps of each backend: the engine's logprobs equal the trainer's, up to rounding. Megatron computes a prompt
    once for its samples."""
    demo_task.write(tmp_path)
    make_tiny_family(
        tmp_path / "model",
        architecture=architecture,
        characters=demo_task.DIGITS,
        max_positions=64,
        initializer_range=0.05,
    )
    run = demo_run(tmp_path)
    synchronous = changed(changed(run, "run", mode="sync", name="mixture"), "learner", backend=backend)
    rows = await train(synchronous, memory_bus())
    assert len(rows) == 4
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert any("learner/shared_tokens" in row for row in rows) == (backend == "megatron")  # where it costs less
    assert not is_same(weights(synchronous, 3), weights(synchronous, 4))
