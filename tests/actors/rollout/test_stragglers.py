"""Groups with stragglers: at their last possible step they are sent with the finished members; cut-offs are
reported."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout.stragglers import Stragglers
from asyncrl.bus.port import Bus
from asyncrl.errors import RolloutError
from asyncrl.messages import PromptGroup, Trajectory, replace
from asyncrl.messages.topics import EVENTS, PROMPTS, TRAJECTORIES
from tests.harness.buses import first, prompt
from tests.harness.fakes import Engine, Loop, run_worker, single_turn, worker


class Group:
    """Members that end when the test says so, under a rule with max_staleness 4 and min_group 2."""

    def __init__(self, *starts: int) -> None:
        self.rule = Stragglers(max_staleness=4, min_group=2)
        self.starts = dict(enumerate(starts))

    @contextlib.asynccontextmanager
    async def running(self, size: int = 4) -> AsyncIterator[Group]:
        async with asyncio.TaskGroup() as tasks:
            self._ends = [asyncio.Event() for _ in range(size)]
            self.members = [tasks.create_task(end.wait()) for end in self._ends]
            self.cutter = tasks.create_task(self.rule.cut(self.members, self.starts.values))
            yield self
            for end in self._ends:
                end.set()

    async def end(self, *members: int) -> None:
        for member in members:
            self._ends[member].set()
        await settle()

    async def learner_is_at(self, version: int) -> None:
        self.rule.learner_is_at(version)
        await settle()

    @property
    def cut_off(self) -> list[int]:
        return [index for index, member in enumerate(self.members) if member.cancelled()]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_group_goes_in_time_for_the_last_batch_that_may_train_it() -> None:
    # Oldest version 3 and bound 4: the batch of version 7 is the last, and it is taken when the step from 6 ends.
    async with Group(3, 3, 4, 3).running() as group:
        await group.end(0, 1, 2)
        await group.learner_is_at(5)
        assert not group.cutter.done()
        await group.learner_is_at(6)
        assert group.cut_off == [3]
        assert group.cutter.done()


async def test_a_group_waits_until_so_many_are_done_also_beyond_the_bound() -> None:
    async with Group(3, 3, 3, 3).running() as group:
        await group.end(2)
        await group.learner_is_at(6)
        await group.learner_is_at(9)
        assert group.cut_off == []
        await group.end(0)
        assert group.cut_off == [1, 3]


async def test_a_group_that_becomes_whole_is_left_alone() -> None:
    async with Group(3, 3, 3, 3).running() as group:
        await group.end(0, 1, 2, 3)
        assert group.cutter.done()
        await group.learner_is_at(9)
        assert group.cut_off == []


async def test_a_group_that_has_not_started_is_not_cut() -> None:
    async with Group().running() as group:
        await group.learner_is_at(9)
        assert not group.cutter.done()


async def test_who_is_waited_for_counts_from_the_version_that_was_asked() -> None:
    """The group began late, at version 5. The learner counts from version 3, for which it asked, and at version 7 it
    waits for the group. So the group must go at version 6."""
    members = [asyncio.create_task(asyncio.sleep(0 if index < 2 else 60)) for index in range(3)]
    starts = {0: 5, 1: 5, 2: 5}
    rule = Stragglers(max_staleness=4, min_group=2, are_waited_for=True)
    cutter = asyncio.create_task(rule.cut(members, starts.values, asked_at=3))
    await asyncio.wait(members[:2])
    rule.learner_is_at(5)
    await settle()
    assert not cutter.done()
    rule.learner_is_at(6)
    await settle()
    assert cutter.done()
    assert members[2].cancelled()


@pytest.mark.parametrize("least", [2, 3])
async def test_a_sample_that_failed_is_none_of_those_that_go(least: int) -> None:
    """A group in which a sample has failed needs ``min_without_failed`` others, or it fails as a whole."""
    ends = [asyncio.Event() for _ in range(4)]

    async def member(index: int) -> object:
        await ends[index].wait()
        return RolloutError("its tool crashed") if index == 0 else index

    members = [asyncio.create_task(member(index)) for index in range(len(ends))]
    rule = Stragglers(max_staleness=4, min_group=2)
    starts = dict.fromkeys(range(len(ends)), 3)
    cutter = asyncio.create_task(rule.cut(members, starts.values, min_without_failed=least))
    rule.learner_is_at(6)
    for index in range(least):
        ends[index].set()
        await settle()
    assert not cutter.done()
    ends[least].set()
    await settle()
    assert cutter.done()
    for end in ends:
        end.set()
    await asyncio.wait(members)
    assert [one.cancelled() for one in members] == [index > least for index in range(4)]


async def cancels_itself(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
    helper = asyncio.ensure_future(asyncio.Event().wait())
    if index:
        helper.cancel()
        await helper
    return await single_turn(prompt, generate, index=index)


@pytest.mark.parametrize("rule", [None, Stragglers(max_staleness=2, min_group=2)], ids=["whole", "stragglers"])
async def test_a_rollout_function_that_cancels_itself_is_no_straggler(bus: Bus, rule: Stragglers | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_worker(worker(bus, Engine(), rollout=cancels_itself, stragglers=rule)))
        await bus.publish(PROMPTS, replace(prompt(0), group_size=3), key="0")
        (record,) = await first(bus, 1, topic=TRAJECTORIES)
        task.cancel()
    assert record.message.error == "the rollout function cancelled itself"
    assert record.message.cancelled == 0


async def stuck(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
    """Never finish the last member of every third group."""
    made = await single_turn(prompt, generate, index=index)
    if index == 2 and prompt.group_id % 3 == 0:
        await asyncio.Event().wait()
    return made


async def test_a_member_that_never_ends_costs_itself_and_no_group(bus_factory: Any, tmp_path: Path) -> None:
    """With eviction "wait", the learner would hold forever for groups with a stuck member. These groups are trained
    with two members."""
    loop = Loop(await bus_factory(), tmp_path, steps=6, group_size=3, wait_for_stragglers=True, are_stragglers_cut=True)
    rule = Stragglers(max_staleness=2, min_group=2, are_waited_for=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            run_worker(worker(await bus_factory(), Engine(), rollout=stuck, stragglers=rule, max_running=64))
        )
        tasks.create_task(loop.run_learner())
    rows = loop.recorder.rows
    assert rows[-1]["staleness/dropped_groups"] == 0
    cut = [key for key in await loop.bus.keys(EVENTS) if key.startswith("0-cancelled-")]
    assert sum(row["staleness/cancelled"] for row in rows) == len(cut) >= 3
    answers = sum(len(micro.boundaries) - 1 for step in loop.backend.trained for micro in step)
    assert answers == 12 * 3 - len(cut)
    assert max(row["staleness/max"] for row in rows) <= 2


async def test_more_stuck_groups_than_a_batch_takes_do_not_stop_the_run(bus_factory: Any, tmp_path: Path) -> None:
    """Four of the first five groups have a member that never ends. Workers cut it off when the next step is the last
    for the group, so the learner must reach that step. Groups beyond one batch are dropped then."""

    async def mostly_stuck(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
        made = await single_turn(prompt, generate, index=index)
        if index == 2 and 1 <= prompt.group_id < 5:
            await asyncio.Event().wait()
        return made

    loop = Loop(
        await bus_factory(),
        tmp_path,
        steps=10,
        groups_per_batch=1,
        group_size=3,
        max_staleness=4,
        wait_for_stragglers=True,
        are_stragglers_cut=True,
    )
    rule = Stragglers(max_staleness=4, min_group=2, are_waited_for=True)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(
            run_worker(
                worker(
                    await bus_factory(),
                    Engine(),
                    rollout=mostly_stuck,
                    stragglers=rule,
                    max_running=64,
                    max_staleness=4,
                )
            )
        )
        tasks.create_task(loop.run_learner())
    assert loop.learner.step == 10
    assert sum(row["staleness/cancelled"] for row in loop.recorder.rows) >= 1
