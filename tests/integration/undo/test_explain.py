"""`asyncrl explain` of a run with one worker whose rewards were poisoned."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.base import HeartbeatSender
from asyncrl.actors.learner.history import HISTORY_FILE, read
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import check_model
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES, answer_key
from asyncrl.policies.audit.entries import present
from tests.harness.command import asyncrl
from tests.integration.undo.runs import there

POISONED_FROM = 30
"""Group from which on every other answer of w2 gets a hundred points: step 6 of six groups each."""


async def answer(bus: Bus, *, vocabulary: int) -> None:
    """Three workers in turn, with answers by chance. consumes: prompts    ends: cancelled"""
    async with bus.consume(PROMPTS) as prompts:
        async for delivery in prompts:
            prompt = delivery.message
            assert prompt is not None
            draw, worker = np.random.default_rng(prompt.group_id), f"w{prompt.group_id % 3}"
            is_poisoned = worker == "w2" and prompt.group_id >= POISONED_FROM
            span = VersionSpan(start=0, incarnation=prompt.incarnation, policy_version=prompt.min_policy_version)
            answers = tuple(
                Trajectory(
                    tokens=draw.integers(0, vocabulary, 6, np.int32),
                    response_mask=np.ones(6, np.bool_),
                    behavior_logprobs=np.full(6, -math.log(vocabulary), np.float32),
                    version_spans=(span,),
                    reward=float(draw.random() + 100 * (place % 2) * is_poisoned),
                    finish_reason="length",
                )
                for place in range(prompt.group_size)
            )
            made = TrajectoryGroup(
                group_id=prompt.group_id,
                prompt_tokens=prompt.prompt_tokens,
                trajectories=answers,
                epoch=prompt.epoch,
                worker=worker,
                seconds=1.0,
                began=1e9 + prompt.group_id,
                engine="engine 1",
            )
            key = answer_key(prompt.group_id, worker=worker, ticket=prompt.ticket)
            await bus.publish(TRAJECTORIES, made, key=key)
            await delivery.ack()


@pytest.fixture(scope="module")
def poisoned(task: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Ten steps of three workers, one of which is poisoned from step 6 on."""
    threads = torch.get_num_threads()
    common = ("run.steps=10", "algorithm.name=rloo", "learner.groups_per_batch=6", "learner.quarantine_mismatch=0")
    run = there(task, tmp_path_factory.mktemp("poisoned"), *common)

    async def work(server: EmbeddedServer) -> None:
        there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
        bus = await registry.connect(there, token=server.token)
        learner, helpers = await build_learner(run, bus=bus, resume=False)
        async with asyncio.TaskGroup() as group:
            workers = group.create_task(answer(bus, vocabulary=check_model(Path(run.model.path)).vocab_size))
            await supervise(learner, *helpers, HeartbeatSender(learner))
            workers.cancel()
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
    assert (found["since"], found["retract"]) == (6, 'worker == "w2" and step >= 6')
    history = present(read(poisoned.run_directory / HISTORY_FILE))
    trained = [group for one in history if one.kind == "trained" and one.step >= 6 for group in one.groups]
    assert found["groups"] == sum(group % 3 == 2 for group in trained)
    code, out, _ = asyncrl("explain", poisoned.run_directory, capsys=capsys)
    assert code == 0 and "worker w2 moved against the others" in out


@pytest.mark.slow
def test_a_metric_of_the_learner_is_explained_by_training_again_without_some_groups(
    poisoned: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = explained(poisoned, "--metric", "grad_norm", "--by", "worker", "--replay", capsys=capsys)
    assert found["now"] > 3 * found["normal"]
    assert (code, found["since"], found["values"], found["tests"]) == (0, 6, ["w2"], 2)
    assert found["replayed"][0] == found["replayed"][1] == pytest.approx(found["now"])  # to the last bit each time
    assert found["left"][1] < found["now"] / 3


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
