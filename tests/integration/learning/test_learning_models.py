"""The loop learns with a critic, with a teacher and near a reference, with real parts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl.cli.demo import ADAPTERS, OF_FROZEN
from asyncrl.data import demo_task
from asyncrl.weights.ipc import IPCReceiver
from asyncrl.weights.port import Ask, LoadReport
from tests.harness.learning import demo_run, is_same, memory_bus, train, weights
from tests.harness.metric_names import is_known

pytestmark = pytest.mark.slow

SYNC = ("run.mode=sync", "engine.options={max_batch_size=1, threads=1}", "weights.keep=8")
LEARN = ("run.mode=sync", "learner.groups_per_batch=8", "rollout.group_size=8")
"""Fresh tokens learn in the fewest steps, and in as many on a busy machine."""
PPO = ("algorithm.name=ppo", "algorithm.options={}")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    demo_task.write(tmp_path)
    return tmp_path


def initial(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model" / "model.safetensors")


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


async def test_ppo_raises_the_reward(folder: Path) -> None:
    run = demo_run(folder, *PPO, *LEARN, "run.steps=12", "learner.learning_rate=1e-2")
    rows = await train(run, memory_bus())
    assert rows[0]["reward/mean"] < 0.2
    assert mean(rows[-3:], "reward/mean") > 0.5
    assert rows[0]["critic/value_mean"] == 0.0
    assert mean(rows[-3:], "critic/value_mean") == pytest.approx(mean(rows[-3:], "critic/return_mean"), abs=0.15)
    assert all(is_known(name) for row in rows for name in row if name != "step")


async def test_a_critic_that_warms_up_leaves_the_policy_as_it_is_to_the_last_bit(folder: Path) -> None:
    run = demo_run(folder, *PPO, *SYNC, "critic.warmup_steps=2")
    rows = await train(run, memory_bus())
    assert is_same(weights(run, 1), initial(folder))
    assert is_same(weights(run, 2), initial(folder))
    assert not is_same(weights(run, 3), initial(folder))
    assert [row["learner/learning_rate"] for row in rows[:2]] == [0.0, 0.0]
    assert rows[2]["learner/learning_rate"] == pytest.approx(3e-3 / 5)  # the first of learner.warmup_steps
    assert rows[1]["critic/value_mean"] != rows[0]["critic/value_mean"] == 0.0
    assert [row["staleness/max"] for row in rows] == [0.0] * 4


async def test_a_resumed_run_goes_on_with_its_critic_to_the_last_bit(folder: Path) -> None:
    """The warm-up ends after the checkpoint. Only a step's number decides whether it is a warm-up step."""
    whole = demo_run(folder, *PPO, *SYNC, "critic.warmup_steps=3", "run.name=whole")
    expected = await train(whole, memory_bus())
    halves = (*PPO, *SYNC, "critic.warmup_steps=3", "run.name=halves", "learner.warmup_steps=5")
    await train(demo_run(folder, *halves, "run.steps=4", "checkpoint.every_steps=2", "run.name=first"), memory_bus())
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "halves")
    shutil.rmtree(folder / "runs" / "halves" / "checkpoints" / "step-00000004")
    resumed = demo_run(folder, *halves)
    rows = await train(resumed, memory_bus(), resume=True)
    assert [row["step"] for row in rows][-2:] == [3, 4]
    for row, wanted in zip(rows[-2:], expected[-2:], strict=True):
        assert [row[name] for name in ("critic/loss", "reward/mean")] == [
            wanted[name] for name in ("critic/loss", "reward/mean")
        ]
    assert is_same(weights(resumed, 4, epoch=1), weights(whole, 4))
    assert not is_same(weights(whole, 4), weights(whole, 3))


async def test_a_teachers_signal_brings_the_policy_near_it(folder: Path) -> None:
    """The teacher is the model after some steps of grpo; the student never uses the reward."""
    taught = demo_run(folder, *LEARN, "run.name=teacher", "run.steps=10", "learner.learning_rate=1e-2")
    teacher = mean((await train(taught, memory_bus()))[-3:], "reward/mean")
    run = demo_run(
        folder,
        *LEARN,
        "run.steps=8",
        "learner.learning_rate=1e-2",
        "algorithm.name=opd",
        "algorithm.options={}",
        f"teacher.path={taught.weights_directory / '0-10'}",
    )
    rows = await train(run, memory_bus())
    assert rows[-1]["teacher_kl"] < 0.5 * rows[0]["teacher_kl"]
    assert mean(rows[-3:], "reward/mean") > rows[0]["reward/mean"] + 0.5 * (teacher - rows[0]["reward/mean"])


async def test_a_teacher_on_a_server_of_the_run_teaches_the_same(folder: Path) -> None:
    """In sync mode and from the same seed, the first steps are those with the teacher in the learner."""
    taught = demo_run(folder, *SYNC, "run.name=teacher", "run.steps=2", "learner.learning_rate=1e-2")
    await train(taught, memory_bus())
    path = taught.weights_directory / "0-2"
    opd = (*SYNC, "run.steps=2", "algorithm.name=opd", "algorithm.options={}")
    loaded = await train(demo_run(folder, *opd, "run.name=loaded", f"teacher.path={path}"), memory_bus())
    kind = 'kind="tests.harness.stub_server:ModelOnACpu"'
    run = demo_run(folder, *opd, "run.name=served", f'servers.big={{{kind}, path="{path}"}}', "teacher.server=big")
    served = await train(run, memory_bus())
    for first, second in zip(loaded, served, strict=True):
        assert second["teacher_kl"] == pytest.approx(first["teacher_kl"], rel=1e-3)
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-3, abs=1e-6)


async def test_the_likeliest_tokens_of_a_served_teacher_teach_more_than_the_sampled_ones(folder: Path) -> None:
    """From the same start, in as many steps, forward KL over the teacher's five likeliest brings the policy nearer."""
    taught = demo_run(folder, *LEARN, "run.name=teacher", "run.steps=10", "learner.learning_rate=1e-2")
    await train(taught, memory_bus())
    kind = 'kind="tests.harness.stub_server:ModelOnACpu"'
    big = f'servers.big={{{kind}, path="{taught.weights_directory / "0-10"}"}}'
    common = (*SYNC, "run.steps=5", "learner.learning_rate=5e-3", "algorithm.options={}", big, "teacher.server=big")
    sampled = await train(demo_run(folder, *common, "run.name=sampled", "algorithm.name=opd"), memory_bus())
    distilled = (*common, "run.name=distilled", "algorithm.name=distill", "teacher.top_logprobs=5")
    rows = await train(demo_run(folder, *distilled), memory_bus())
    assert rows[0]["teacher_kl"] == pytest.approx(sampled[0]["teacher_kl"], rel=1e-3)
    assert rows[-1]["teacher_kl"] < min(sampled[-1]["teacher_kl"], 0.5 * rows[0]["teacher_kl"])


async def test_score_centering_learns_from_the_likeliest_tokens_of_the_engine(folder: Path) -> None:
    run = demo_run(
        folder,
        *LEARN,
        "run.mode=one_step_off",
        "run.steps=10",
        "learner.learning_rate=1e-2",
        "algorithm.loss=score_centered",
        "algorithm.correction=none",
        "algorithm.options={cap=1.5}",
        "rollout.top_logprobs=4",
    )
    rows = await train(run, memory_bus())
    assert rows[-1]["staleness/max"] == 1.0
    assert mean(rows[-3:], "reward/mean") > rows[0]["reward/mean"] + 0.15


async def test_a_reference_holds_the_policy_back(folder: Path) -> None:
    far, near = [
        await train(
            demo_run(folder, "run.mode=sync", f"run.name={name}", "run.steps=12", f"reference.kl_coef={coef}"),
            memory_bus(),
        )
        for name, coef in (("far", 1e-6), ("near", 1.0))
    ]
    assert far[0]["kl"] == near[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert far[-1]["kl"] > 0.01
    assert near[-1]["kl"] < 0.3 * far[-1]["kl"]


async def test_kl_in_the_reward_trains_with_and_without_a_critic(folder: Path) -> None:
    for name in ("ppo", "reinforce_pp"):
        run = demo_run(
            folder,
            f"run.name={name}",
            f"algorithm.name={name}",
            "algorithm.options={}",
            "reference.kl_coef=0.05",
            "reference.kl_in=reward",
        )
        rows = await train(run, memory_bus())
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert rows[-1]["kl"] > 0
        assert min(row["grad_norm"] for row in rows) > 0


async def test_adapters_alone_learn_the_task(tmp_path: Path) -> None:
    """As in `bin/demo --lora`: the base weights stay unchanged, and engines receive the sum."""
    demo_task.write(tmp_path, initializer_range=OF_FROZEN)
    overrides = ("learner.backend=megatron", *ADAPTERS, *LEARN, "run.steps=12", "learner.learning_rate=2e-2")
    run = demo_run(tmp_path, *overrides)
    rows = await train(run, memory_bus())
    assert rows[0]["reward/mean"] < 0.2
    assert mean(rows[-3:], "reward/mean") > 0.4
    before, after = initial(tmp_path), weights(run, len(rows))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}


async def test_engines_in_turns_copy_the_weights_from_the_memory_of_the_learner_that_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared GPU by CUDA IPC; here by the learner's memory on the host."""
    copied: list[LoadReport] = []
    receive = IPCReceiver.receive

    async def noting(self: IPCReceiver, ask: Ask) -> LoadReport:
        copied.append(await receive(self, ask))
        return copied[-1]

    monkeypatch.setattr(IPCReceiver, "receive", noting)
    rows = await train(demo_run(folder, *SYNC, "run.colocated=true", "weights.channel=nccl"), memory_bus())
    assert [row["staleness/max"] for row in rows] == [0.0] * 4
    assert min(row["learner/offload_seconds"] for row in rows) >= 0
    assert len(copied) >= 3
