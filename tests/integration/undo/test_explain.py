"""`asyncrl explain` of a run with one worker whose rewards were poisoned."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import RunConfig
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.version import VERSION
from tests.harness.command import asyncrl
from tests.integration.undo.runs import HERE, there


@pytest.fixture(scope="module")
def poisoned(task: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Ten steps of three workers; the rewards of w2 are poisoned from version 4 on."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("poisoned")
    common = ("run.steps=10", "algorithm.name=rloo", "learner.groups_per_batch=6")
    run = there(task, folder, *common, f"reward.kind={HERE}:right")
    bad = there(task, folder, *common, f"reward.kind={HERE}:poisoned")

    async def work(server: EmbeddedServer) -> None:
        there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
        bus = await registry.connect(there, token=server.token)
        learner, helpers = await build_learner(run, bus=bus, resume=False)
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                worker, *beside = await build_worker(bad if number == 2 else run, bus=bus, name=f"w{number}")
                group.create_task(supervise(worker, *beside, HeartbeatSender(worker)))
            await supervise(learner, *helpers, HeartbeatSender(learner))
        await bus.close()

    with EmbeddedServer(run.run_directory / "nats", run="run") as server:
        asyncio.run(work(server))
    torch.set_num_threads(threads)
    return run


def explained(run: RunConfig, *arguments: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code, out, err = asyncrl("explain", run.run_directory, "--json", *arguments, capsys=capsys)
    assert out, err
    return code, json.loads(out)


@pytest.mark.slow
def test_the_worker_that_moved_the_reward_is_named_with_what_retracts_it(
    poisoned: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = explained(poisoned, "--metric", "reward/mean", "--replay", capsys=capsys)
    assert (code, found["by"], found["values"]) == (0, "worker", ["w2"])
    assert 4 <= found["since"] <= 8  # its first poisoned group may wait for some steps
    assert found["retract"] == f'worker == "w2" and step >= {found["since"]}'
    assert found["tests"] <= 2 * math.log2(3) * 5
    engines = {one["value"] for one in found["suspects"] if one["field"] == "engine"}
    assert engines <= {f"inprocess {VERSION}"}
    code, out, _ = asyncrl("explain", poisoned.run_directory, capsys=capsys)
    assert code == 0 and "worker w2 moved against the others" in out


@pytest.mark.slow
def test_a_metric_of_the_learner_is_explained_by_training_again_without_some_groups(
    poisoned: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = explained(poisoned, "--metric", "grad_norm", "--by", "worker", "--replay", capsys=capsys)
    assert found["now"] > 3 * found["normal"]
    assert (code, found["values"]) == (0, ["w2"])
    assert found["tests"] <= 2 * math.ceil(math.log2(3))


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_and_mistakes_get_one_line(
    graded_wrong: RunConfig, poisoned: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = asyncrl("explain", graded_wrong.run_directory, "--by", "worker", "--replay", capsys=capsys)
    assert code == 1, err
    assert "nothing is found" in out and "moved against the others" in out

    def refused(*arguments: Any) -> str:
        code, _, err = asyncrl("explain", poisoned.run_directory, *arguments, capsys=capsys)
        assert (code, err.count("\n")) == (2, 1), err
        return err

    assert "did you mean reward/mean" in refused("--metric", "reward/maen")
    assert "--step 90: " in refused("--step", "90")
    assert "--since 8: must be 1 to 6" in refused("--step", "6", "--since", "8")
    assert "--by wroker: must be one of worker" in refused("--by", "wroker")
