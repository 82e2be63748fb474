"""A learner whose newest checkpoint is damaged or missing continues from the previous one and loses no group."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import checkpoint
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.errors import BackendError
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.audit.accounting import Account
from tests.harness.fakes import Engine, Loop, run_worker, worker


async def killed_in_step(count: int, loop: Loop) -> None:
    def die(step: int) -> None:
        if step == count - 1:
            raise BackendError("killed")

    loop.backend.before_step = die
    with pytest.raises(BackendError, match="killed"):
        await loop.run_learner()


async def account_of(loop: Loop) -> Account:
    return await account_with(RecordedRun(loop.directory), loop.bus)


def newest(loop: Loop) -> Path:
    return checkpoint.list_complete(loop.directory / "checkpoints")[-1]


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "deleted by a person": shutil.rmtree,
    "its backend cut": lambda folder: os.truncate(folder / "backend" / "steps", 0),
    "a byte of learner.json changed": lambda folder: (folder / "learner.json").write_text(
        (folder / "learner.json").read_text().replace('"watermark": ', '"watermark": 1', 1)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_one_before_is_used_and_every_group_is_accounted_for(
    bus_factory: Any, tmp_path: Path, damage: str
) -> None:
    """Killed in step 8 with checkpoints at 4 and 6, the learner falls back to 4 and trains steps 5 and 6 again."""
    first = Loop(await bus_factory(), tmp_path, steps=12, checkpoint_every=2)
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    await killed_in_step(8, first)
    assert newest(first).name == "step-00000006"
    DAMAGES[damage](newest(first))
    down = await account_of(first)
    assert (down.problems, down.lost, down.duplicated) == ((), 0, 0)
    second = Loop(await bus_factory(), tmp_path, steps=12, checkpoint_every=2)
    await second.run_learner(resume=True)
    await task
    made = await account_of(second)
    assert made.problems == ()
    assert (made.lost, made.duplicated, made.steps, made.trained, made.incarnations) == (0, 0, 12, 24, 2)
    assert made.retrained > 0
    assert second.trained_groups == 2 * (12 - 4)
    published = await second.bus.last_sequence(PROMPTS)
    assert published == made.trained + made.dropped + made.pending  # no prompt was published twice


async def test_the_log_is_kept_for_the_newest_checkpoint_and_the_one_before(bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(await bus_factory(), tmp_path, steps=6, checkpoint_every=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    before, last = checkpoint.list_complete(loop.directory / "checkpoints")
    needed = checkpoint.read(before)[0].consumed["watermark"]
    assert needed < checkpoint.read(last)[0].consumed["watermark"]
    kept = await loop.bus.last_sequence(TRAJECTORIES) - (needed - 1)
    assert await loop.bus.depth(TRAJECTORIES) == kept
