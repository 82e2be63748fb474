"""`asyncrl audit` on runs that were finished, killed and broken; `asyncrl replay` of a real one, to the last bit."""

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

from asyncrl import app, config
from asyncrl.bus.server import EmbeddedServer
from asyncrl.commands.audit import account_with
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError, RewardError
from asyncrl.policies.accounting import Account
from asyncrl.policies.filters import dynamic_sampling
from asyncrl.protocols import Reward, Sample
from asyncrl.recorded import RecordedRun
from asyncrl.topics import PROGRESS
from tests import fakes
from tests.fakes import Engine, Loop, run_worker, worker
from tests.learning_fixtures import DEMO, demo_run, is_same, train, weights
from tests.test_cli import asyncrl


async def account_of(loop: Loop) -> Account:
    return await account_with(RecordedRun(loop.directory), loop.bus)


async def test_a_finished_run_accounts_for_every_group(bus_factory: Any, tmp_path: Path) -> None:
    """Of what was answered some is buried, some filtered, and the rest trained."""

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
    assert (made.trained, made.pending, made.epochs, made.steps) == (12, 0, 1, 6)
    assert made.buried > 0 and made.filtered > 0
    assert made.prompts == made.published == made.trained + made.dropped + made.buried + made.filtered


async def test_a_killed_learner_is_audited_while_it_is_down_and_after_its_next_life(
    bus_factory: Any, tmp_path: Path
) -> None:
    """It dies in step 6 with a checkpoint at 4; step 5 is of a history that its next life does not have."""
    first = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)

    def die(step: int) -> None:
        if step == 5:
            raise RuntimeError("killed")

    first.backend.before_step = die
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(RuntimeError, match="killed"):
        await first.run_learner()
    down = await account_of(first)
    assert (down.is_clean, down.trained, down.steps) == (True, 10, 5)
    second = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2)
    await second.run_learner(resume=True)
    await task
    made = await account_of(second)
    assert made.problems == ()
    assert (made.trained, made.steps, made.epochs, made.pending) == (16, 8, 2, 0)
    assert made.max_staleness <= made.bound == 2


async def test_a_group_of_which_no_line_tells_is_lost(bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(await bus_factory(), tmp_path, steps=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    path = tmp_path / "history.jsonl"
    path.write_text(path.read_text().replace("[0, 1]", "[0]   "))
    made = await account_of(loop)
    assert (made.lost, made.problems) == (1, ("group 1: done by the checkpoint's ledger, but no line says how",))


# -- a real run, from its folder ---------------------------------------------------------------------------------------


def train_there(run: RunConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """Learner and worker in this process, on a nats-server in the run's folder as `asyncrl run` starts it."""

    async def work(server: EmbeddedServer) -> list[dict[str, Any]]:
        there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
        bus = await app.connect(there, token=server.token)
        try:
            if resume:
                progress = (await bus.states(PROGRESS))[""]
                await bus.put(PROGRESS, dataclasses.replace(progress, finished=False))
            return await train(run, bus, resume=resume)
        finally:
            await bus.close()

    with EmbeddedServer(run.run_directory / "nats") as server:
        return asyncio.run(work(server))


@pytest.mark.parametrize("is_up", [True, False], ids=["run is up", "run was killed"])
def test_no_second_server_is_started_on_the_store_of_a_run_that_is_up(is_up: bool, tmp_path: Path) -> None:
    """Its nats-server was killed and is coming back. A launcher that was killed leaves its address behind."""
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
    """Four steps, then killed as it were before the checkpoint at 4 was written, and resumed to 6 at half the rate."""
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
    assert (made["trained"], made["retrained"], made["steps"], made["epochs"]) == (24, 8, 6, 2)
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
def test_what_cannot_be_replayed_gets_one_line(
    run: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*arguments: Any) -> str:
        code, _, err = asyncrl("replay", *arguments, capsys=capsys)
        assert (code, len(err.splitlines())) == (2, 1)
        return err

    assert "has steps 1 to 6" in refused(run.run_directory, "--from-step", "7")
    assert "a replay has its batches already" in refused(run.run_directory, "--set", "rollout.group_size=2")
    assert "is there already" in refused(run.run_directory, "--out", tmp_path)
    copy = tmp_path / "run"
    copy.mkdir()
    text = (run.run_directory / "history.jsonl").read_text()
    (copy / "history.jsonl").write_text(text.replace('"keep_log": true', '"keep_log": false'))
    assert "checkpoint.keep_log was off" in refused(copy)
