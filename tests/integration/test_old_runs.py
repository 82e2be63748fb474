"""A run of the code before schema 2 (tests/data/v1): killed after 8 steps, resumed from step 5, killed after 16."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.account import account_with
from asyncrl.audit.replay import plan_of, train_again
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.data import demo_task
from asyncrl.errors import CheckpointError
from asyncrl.messages.codec import decode
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.audit.accounting import present
from asyncrl.state import checkpoint
from tests import ROOT

V1 = ROOT / "tests/data/v1"


@pytest.fixture
def old_run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(Path(shutil.copytree(V1, tmp_path / "old")))


async def publish_what_was_left(bus: Bus) -> None:
    """Publish the prompts and trajectories that the old run left on its bus, in their order."""
    topics = {topic.name: topic for topic in (PROMPTS, TRAJECTORIES)}
    for line in map(json.loads, (V1 / "bus.jsonl").read_text().splitlines()):
        if (topic := topics.get(line["topic"])) is not None:
            message = decode(base64.b64decode(line["data"]), topic.message_type)
            assert await bus.publish(topic, message, key=line["key"])


async def test_its_audit_has_the_numbers_that_the_old_code_gave(bus_factory: Any, old_run: RecordedRun) -> None:
    bus = await bus_factory()
    await publish_what_was_left(bus)
    made = await account_with(old_run, bus)
    assert made.problems == ()
    assert (made.prompts, made.published, made.trained, made.steps, made.incarnations) == (40, 38, 32, 16, 2)
    assert (made.failed, made.dropped, made.pending, made.retrained) == (2, 0, 6, 6)
    assert (made.max_staleness, made.on_log, made.with_metrics) == (2, 32, 16)


async def publish_under_another_key(bus: Bus) -> None:
    """Publish groups that the old run rejected: groups it had trained, with other rewards."""
    for number, line in enumerate(map(json.loads, (V1 / "bus.jsonl").read_text().splitlines())):
        if line["topic"] == TRAJECTORIES.name:
            group = decode(base64.b64decode(line["data"]), TRAJECTORIES.message_type)
            made = tuple(dataclasses.replace(one, reward=float(i)) for i, one in enumerate(group.trajectories))
            assert await bus.publish(TRAJECTORIES, dataclasses.replace(group, trajectories=made), key=f"x{number}")


async def test_its_replay_computes_the_losses_it_recorded(
    bus_factory: Any, old_run: RecordedRun, tmp_path: Path
) -> None:
    bus = await bus_factory()
    await publish_under_another_key(bus)
    await publish_what_was_left(bus)
    await asyncio.to_thread(demo_task.write, tmp_path)
    plan, folder = plan_of(old_run, present(old_run.history()), from_step=1, overrides=())
    assert folder is None
    plan = [
        one._replace(
            run=dataclasses.replace(one.run, model=dataclasses.replace(one.run.model, path=str(tmp_path / "model")))
        )
        for one in plan
    ]
    async with contextlib.aclosing(train_again(plan, bus, folder=None, out=tmp_path / "out")) as trained:
        found = {step: metrics async for step, metrics in trained}
    rows = old_run.metrics()
    for one in plan:
        row = rows[one.entry.incarnation, one.entry.step]
        # results differ slightly on another processor
        assert math.isclose(found[one.entry.step]["loss"], row["loss"], abs_tol=2e-4)


def test_its_metrics_have_their_present_names(old_run: RecordedRun) -> None:
    rows = old_run.metrics()
    assert len(rows) == 19 and {incarnation for incarnation, _ in rows} == {0, 1}
    assert rows[1, 16]["staleness/failed_groups"] == 2.0 and "bus/rejected" in rows[1, 16]


def test_its_checkpoint_is_read(old_run: RecordedRun) -> None:
    found = old_run.checkpoint()
    assert found is not None
    state, folder = found
    assert (state.incarnation, state.step, state.groups_trained, state.groups_failed) == (1, 15, 30, 2)
    assert folder == old_run.directory / "checkpoints/step-00000015-epoch-1/backend"


def test_a_checkpoint_of_a_later_format_is_refused_with_what_to_do(old_run: RecordedRun) -> None:
    path = old_run.directory / "checkpoints/step-00000015-epoch-1"
    table = json.loads((path / "learner.json").read_text())
    (path / "learner.json").write_text(json.dumps(table | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, .*; resume the run with the version that wrote it"):
        checkpoint.read(path)
