"""Effects of [staleness] in the loop: the order of training, and weights that fall with age."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.port import Bus
from asyncrl.errors import BackendError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, replace
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.groups.validation import GroupValidation
from tests.harness.fakes import Engine, Loop, run_worker, until, worker
from tests.harness.rows import Rows


def group(group_id: int, *, version: int = 0, members: int = 2) -> TrajectoryGroup:
    made = Trajectory(
        tokens=np.array([4, 5], np.int32),
        response_mask=np.ones(2, np.bool_),
        behavior_logprobs=np.full(2, -1.0, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
        reward=1.0,
    )
    prompt = np.array([1, 4 + group_id], np.int32)
    return TrajectoryGroup(group_id=group_id, prompt_tokens=prompt, trajectories=(made,) * members)


class Hand:
    """A manual rollout worker: takes and answers as many prompt groups as the test says."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @contextlib.asynccontextmanager
    async def taking(self) -> AsyncIterator[Hand]:
        async with self._bus.consume(PROMPTS) as deliveries:
            self._deliveries = deliveries
            yield self

    async def answer(self, count: int, *, version: int = 0) -> None:
        for _ in range(count):
            delivery = await anext(self._deliveries)
            assert (prompt := delivery.message) is not None
            made = group(prompt.group_id, version=version)
            made = replace(made, prompt_tokens=prompt.prompt_tokens, epoch=prompt.epoch)
            await self._bus.publish(TRAJECTORIES, made, key=delivery.key)
            await delivery.ack()

    async def published(self) -> int:
        return await self._bus.last_sequence(PROMPTS)


async def ended(task: asyncio.Task[Any], loop: Loop) -> None:
    loop.learner.drain()
    await task


# -- the order of training ---------------------------------------------------------------------------------------------


def trained(loop: Loop) -> list[list[int]]:
    """Return group ids of each step. With Rows(1000), as from a Hand, a prompt's second token identifies its group."""
    return [
        sorted({int(micro.tokens[start + 1]) - 4 for micro in step for start in micro.boundaries[:-1]})
        for step in loop.backend.trained
    ]


@pytest.mark.parametrize(
    ("order", "second"), [("oldest_first", [2, 3]), ("freshest_first", [4, 5]), ("in_order", [2, 3])]
)
async def test_a_batch_is_the_first_groups_of_the_order_the_run_file_names(
    order: str, second: list[int], bus_factory: Any, tmp_path: Path
) -> None:
    """While step 1 trains groups 0 and 1, two old groups and two groups of the next version arrive."""
    bus = await bus_factory()
    forward_looking = Validator(
        bus, validation=GroupValidation(are_sampled=False)
    )  # version 1 does not exist while step 1 runs
    loop = Loop(bus, tmp_path, staleness={"order": order}, rows=Rows(1000), validator=forward_looking)
    reached, go = threading.Event(), threading.Event()

    def pause(step: int) -> None:
        if step == 0:
            reached.set()
            go.wait(60)

    loop.backend.before_step = pause
    task = asyncio.create_task(loop.run_learner())
    async with Hand(await bus_factory()).taking() as hand:
        await hand.answer(2)
        await until(reached.is_set)
        await hand.answer(2, version=0)
        await hand.answer(2, version=1)
        await until(lambda: len(loop.table.buffered) + len(loop.table.training) == 6)
        go.set()
        await until(lambda: loop.backend.steps >= 2)
        await ended(task, loop)
    assert trained(loop)[:2] == [[0, 1], second]


async def test_in_order_trains_the_prompts_in_their_order_across_a_restart(bus_factory: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "checkpoint_every": 2, "staleness": {"order": "in_order"}}
    first = Loop(await bus_factory(), tmp_path, rows=Rows(1000), **settings)

    def die(step: int) -> None:
        if step == 5:
            raise BackendError("killed")

    first.backend.before_step = die
    workers = [asyncio.create_task(run_worker(worker(await bus_factory(), Engine(), name=name))) for name in "ab"]
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    second = Loop(await bus_factory(), tmp_path, rows=Rows(1000), **settings)
    await second.run_learner(resume=True)
    for task in workers:
        await task
    ids = [group_id for step in trained(first)[:4] + trained(second) for group_id in step]
    assert ids == sorted(set(ids))
    assert len(ids) == 16


# -- weights that fall with age ----------------------------------------------------------------------------------------


async def test_old_tokens_count_less_and_the_step_says_how_much(bus_factory: Any, tmp_path: Path) -> None:
    """Batches of two groups, one of version 0 and one of version 1, trained from version 1."""
    loop = Loop(await bus_factory(), tmp_path, steps=2, max_staleness=1, staleness={"weight": "inverse"})
    task = asyncio.create_task(loop.run_learner())
    async with Hand(await bus_factory()).taking() as hand:
        await hand.answer(2)
        await until(lambda: loop.backend.steps == 1)
        await hand.answer(1, version=0)
        await hand.answer(1, version=1)
        await task
    fresh, mixed = loop.backend.trained
    assert set(fresh[0].loss_weights[fresh[0].response_mask].tolist()) == {0.125}  # 1 of 8 tokens
    assert sorted(set(mixed[0].loss_weights[mixed[0].response_mask].tolist())) == [0.0625, 0.125]
    assert [row["staleness/weight"] for row in loop.recorder.rows] == [1.0, 0.75]
