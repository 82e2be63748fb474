"""`asyncrl audit` of finished, killed and broken runs; `asyncrl replay` of a real run, identical to the last bit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.backends.port import Backend
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import BackendError, ConfigError, RewardError
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.messages.topics import PROGRESS, PROMPTS, TRAJECTORIES
from asyncrl.policies.audit.accounting import Account
from asyncrl.policies.batching.filters import dynamic_sampling
from asyncrl.rewards.port import Reward, Sample
from tests.harness import buses, fakes
from tests.harness.command import asyncrl
from tests.harness.fakes import Engine, Loop, run_worker, worker
from tests.harness.histories import forge
from tests.harness.learning import DEMO, demo_run, is_same, train, weights


async def account_of(loop: Loop) -> Account:
    return await account_with(RecordedRun(loop.directory), loop.bus)


async def test_a_finished_run_accounts_for_every_group(bus_factory: Any, tmp_path: Path) -> None:
    """Some of the answered groups fail, some are filtered, and all others are trained."""

    def picky(samples: Sequence[Sample]) -> Sequence[Reward]:
        if samples[0].label == 0:
            raise RewardError("cannot judge p0")
        return [Reward(value=1.0) for _ in samples] if samples[0].label == 1 else fakes.token_sum(samples)

    loop = Loop(
        await bus_factory(), tmp_path, steps=6, checkpoint_every=2, filters={"dynamic_sampling": dynamic_sampling}
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine(), reward=fakes.Judge(picky))))
        await loop.run_learner()
    made = await account_of(loop)
    assert made.problems == ()
    assert (made.trained, made.pending, made.incarnations, made.steps) == (12, 0, 1, 6)
    assert made.failed > 0 and made.filtered > 0
    assert made.prompts == made.published == made.trained + made.dropped + made.failed + made.filtered


async def test_a_killed_learner_is_audited_while_it_is_down_and_after_its_next_life(
    bus_factory: Any, tmp_path: Path
) -> None:
    """It dies in step 6 with a checkpoint at 4. Step 5 belongs to a history that the next incarnation does not have."""
    first = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)

    def die(step: int) -> None:
        if step == 5:
            raise BackendError("killed")

    first.backend.before_step = die
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    down = await account_of(first)
    assert (down.is_clean, down.trained, down.steps) == (True, 10, 5)
    second = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)
    await second.run_learner(resume=True)
    await task
    made = await account_of(second)
    assert made.problems == ()
    assert (made.trained, made.steps, made.incarnations, made.pending) == (16, 8, 2, 0)
    assert made.max_staleness <= made.bound == 2


async def test_a_group_of_which_no_line_tells_is_lost(bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(await bus_factory(), tmp_path, steps=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    forge(tmp_path / "history.jsonl", "[0, 1]", "[0]   ")
    made = await account_of(loop)
    assert (made.lost, made.problems) == (1, ("group 1: done by the checkpoint's ledger, but no line says how",))


async def test_what_somebody_put_under_a_key_that_no_group_has_is_passed_over(bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(await bus_factory(), tmp_path, steps=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    before = await account_of(loop)
    await loop.bus.publish(PROMPTS, buses.prompt(0), key="x")
    await loop.bus.publish(TRAJECTORIES, buses.group(0), key="007")
    assert await account_of(loop) == before


# -- a real run, from its folder ---------------------------------------------------------------------------------------


def train_there(run: RunConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """Run learner and worker in this process, with a nats-server in the run's folder as `asyncrl run` starts it."""

    async def work(server: EmbeddedServer) -> list[dict[str, Any]]:
        there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
        bus = await registry.connect(there, token=server.token)
        try:
            if resume and (progress := (await bus.states(PROGRESS)).get("")) is not None:
                await bus.put(PROGRESS, dataclasses.replace(progress, finished=False))
            return await train(run, bus, resume=resume)
        finally:
            await bus.close()

    with EmbeddedServer(run.run_directory / "nats", run=run.run.name) as server:
        return asyncio.run(work(server))


@pytest.mark.parametrize("is_up", [True, False], ids=["run is up", "run was killed"])
def test_no_second_server_is_started_on_the_store_of_a_run_that_is_up(is_up: bool, tmp_path: Path) -> None:
    """Its nats-server was killed and is restarting. A killed launcher leaves its address behind."""
    with EmbeddedServer(tmp_path / "nats") as server:
        address = {"url": server.url, "token": server.token, "pid": os.getpid() if is_up else 2**22 + 1}
    (tmp_path / "bus.json").write_text(json.dumps(address))
    run = config.load(DEMO)
    with contextlib.ExitStack() as stack:
        opened = RecordedRun(tmp_path).server(run, token="")
        if is_up:
            with pytest.raises(ConfigError, match="try again in a moment"):
                stack.enter_context(opened)
        else:
            found = stack.enter_context(opened)
            assert found is not None and found.url != server.url


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Four steps; as if killed before the checkpoint at 4 was written, then resumed to 6 at half the learning rate."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("audit")
    demo_task.write(folder)
    common = ["checkpoint.every_steps=2", "checkpoint.keep_log=true", "weights.keep=9"]
    train_there(demo_run(folder, *common))
    shutil.rmtree(folder / "runs" / "run" / "checkpoints" / "step-00000004")
    resumed = demo_run(folder, *common, "run.steps=6", "learner.learning_rate=1.5e-3")
    train_there(resumed, resume=True)
    torch.set_num_threads(threads)
    return resumed


@pytest.mark.slow
def test_audit_says_what_became_of_every_group_of_a_folder(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = asyncrl("audit", run.run_directory, "--json", capsys=capsys)
    made = json.loads(out)
    assert (code, made["clean"], made["problems"], err) == (0, True, [], "")
    assert (made["trained"], made["retrained"], made["steps"], made["incarnations"]) == (24, 8, 6, 2)
    assert (made["on_log"], made["with_metrics"]) == (24, 6)
    code, out, _ = asyncrl("audit", run.run_directory, capsys=capsys)
    assert (code, out.splitlines()[-1]) == (0, "clean")


@pytest.mark.slow
def test_a_replay_has_the_same_losses_and_weights_to_the_last_bit_across_a_kill(
    run: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = (run.run_directory / "history.jsonl").read_bytes()
    code, out, _ = asyncrl("replay", run.run_directory, "--json", "--out", tmp_path / "again", capsys=capsys)
    made = json.loads(out)
    assert (code, made["equal"], made["compared"], made["changed"]) == (0, True, 6, [])
    last = safetensors.torch.load_file(tmp_path / "again" / "weights" / "1-6" / "model.safetensors")
    assert is_same(last, weights(run, 6, epoch=1))
    assert (run.run_directory / "history.jsonl").read_bytes() == before


async def with_a_slow_tool(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """One answer has a second turn, from four versions later."""
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    first = turns.add_answer(await generate(turns.tokens))
    if (prompt.group_id, index) == (0, 0):
        while True:
            await asyncio.sleep(0.05)
            second = await generate(turns.tokens)
            if second.version_spans[0].policy_version > first.version_spans[0].policy_version + 3:
                break
        turns.add_answer(second)
    return turns.trajectory(reward=0.0)


@pytest.mark.slow
def test_what_is_left_out_of_a_late_answer_is_left_out_of_its_replay_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """So is what comes between its steps: the optimizer starts anew, and the reference becomes the policy."""
    demo_task.write(tmp_path)
    common = ["run.steps=8", "checkpoint.every_steps=2", "checkpoint.keep_log=true", "weights.keep=9"]
    common += ["learner.reset_optimizer=true", "reference.kl_coef=0.1", "reference.refresh_steps=3"]
    function = "rollout.function=tests.integration.test_audit:with_a_slow_tool"
    made = demo_run(tmp_path, *common, function, "staleness.max_staleness=2", "staleness.discard=tokens")
    threads = torch.get_num_threads()
    rows = train_there(made)
    torch.set_num_threads(threads)
    assert sum(row["staleness/old_tokens"] for row in rows) > 0
    assert max(row["staleness/max"] for row in rows) <= 2
    capsys.readouterr()  # what the learner said
    code, out, _ = asyncrl("audit", made.run_directory, "--json", capsys=capsys)
    found = json.loads(out)
    assert (code, found["clean"], found["trained"], found["dropped"]) == (0, True, 32, 0)
    code, out, _ = asyncrl("replay", made.run_directory, "--json", "--out", tmp_path / "again", capsys=capsys)
    assert (code, json.loads(out)["equal"]) == (0, True)
    code, out, _ = asyncrl("samples", made.run_directory, "--group", "0", capsys=capsys)
    assert code == 0 and "tokens too old" in out


@pytest.mark.slow
def test_a_replay_from_a_step_starts_there_and_with_another_loss_is_an_experiment(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["--set", "algorithm.name=gspo", "--from-step", "4"]
    code, out, _ = asyncrl("replay", run.run_directory, *changed, capsys=capsys)
    rows = out.splitlines()
    assert code == 0
    assert [row.split()[0] for row in rows[1:-1]] == ["4", "5", "6"]
    assert rows[-1].startswith("3 steps with algorithm.name=gspo; in ")
    assert (run.run_directory / "replay-1" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_replay_that_differs_with_nothing_changed_fails(
    run: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.run_directory, copy, ignore=shutil.ignore_patterns("replay-*", "weights"))
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["loss"] += 1e-12
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = asyncrl("replay", copy, "--from-step", "5", capsys=capsys)
    assert code == 1
    assert "DIFFERENT: loss or gradient norm of 1 of 2 steps, the first is 6" in out


@pytest.mark.slow
def test_another_run_file_is_trained_on_recorded_batches_and_on_one_again_and_again(
    run: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With its own model, algorithm and learner; no engine starts, and nothing is sampled."""
    path = tmp_path / "other.toml"
    path.write_text(
        f'[model]\npath = "{run.model.path}"\n[data]\npath = "{run.data.path}"\n'
        '[learner]\nbackend = "reference"\nlearning_rate = 1e-2\nthreads = 1\n'
        f"[rollout]\nmax_new_tokens = 8\ngroup_size = {run.rollout.group_size}\n"
    )
    base = (path, "--from", run.run_directory)
    code, out, _ = asyncrl("replay", *base, "--batches", "2", "--times", "4", "--out", tmp_path / "same", capsys=capsys)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["1", "2", "3", "4"]
    rows = [json.loads(line) for line in (tmp_path / "same" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert len({row["reward/mean"] for row in rows}) == 1 and len({row["loss"] for row in rows}) == 4
    code, out, _ = asyncrl("replay", *base, "--batches", "2:4", "--json", "--out", tmp_path / "three", capsys=capsys)
    made = json.loads(out)
    assert (code, made["compared"], [step["step"] for step in made["steps"]]) == (0, 0, [1, 2, 3])

    def refused(*arguments: Any) -> str:
        code, _, err = asyncrl("replay", *arguments, capsys=capsys)
        assert code == 2 and err.count("\n") == 1
        return err

    assert "--batches: " in refused(*base, "--batches", "90:")
    assert "has steps 1 to 6" in refused(*base, "--batches", "90")
    assert "--times 0: must be 1 or more" in refused(*base, "--times", "0")
    assert "--batches 5:3: the first is behind the last" in refused(*base, "--batches", "5:3")
    assert "is a folder; with --from, name the run file" in refused(run.run_directory, "--from", run.run_directory)
    assert "they choose batches of another run" in refused(run.run_directory, "--times", "2")
    assert "with --from use --batches" in refused(*base, "--from-step", "2")
    assert "add --set rollout.temperature=1\n" in refused(*base, "--set", "rollout.temperature=0.5")


@pytest.mark.slow
def test_a_replay_that_fails_leaves_nothing_behind(
    run: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is between two incarnations, where the backend is restored from a checkpoint."""
    made = iter([registry.backend])

    def backend(run: RunConfig) -> Backend:
        if (real := next(made, None)) is None:
            raise BackendError("no memory")
        return real(run)

    monkeypatch.setattr("asyncrl.audit.replay.registry.backend", backend)
    before = set(run.run_directory.iterdir())
    code, _, err = asyncrl("replay", run.run_directory, capsys=capsys)
    assert (code, err.splitlines()[-1]) == (1, "asyncrl replay: no memory")
    assert set(run.run_directory.iterdir()) == before


@pytest.mark.slow
def test_what_cannot_be_replayed_gets_one_line(
    run: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*arguments: Any) -> str:
        code, _, err = asyncrl("replay", *arguments, capsys=capsys)
        assert (code, len(err.splitlines())) == (2, 1)
        return err

    assert "has steps 1 to 6" in refused(run.run_directory, "--from-step", "7")
    assert "a replay has its batches already" in refused(run.run_directory, "--set", "rollout.group_size=2")
    assert "already exists" in refused(run.run_directory, "--out", tmp_path)
    before = set(run.run_directory.iterdir())
    assert "algorithm.name: 'gpso'" in refused(run.run_directory, "--from-step", "4", "--set", "algorithm.name=gpso")
    assert set(run.run_directory.iterdir()) == before
    copy = tmp_path / "run"
    copy.mkdir()
    shutil.copyfile(run.run_directory / "history.jsonl", copy / "history.jsonl")
    forge(copy / "history.jsonl", '"keep_log": true', '"keep_log": false')
    assert "checkpoint.keep_log was off" in refused(copy)
