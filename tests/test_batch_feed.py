"""Batches are prepared while the step before them runs, and that changes nothing but the time it takes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.actors import batch_feed
from asyncrl.actors.batch_feed import BatchFeed, BatchSettings, Prepared
from asyncrl.checkpoint import PromptState, latest
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.algorithms import Algorithm, resolve
from asyncrl.policies.buffer import Buffer, Held
from asyncrl.policies.catalogue import Advantage
from asyncrl.policies.rows import ALGORITHMS
from asyncrl.topics import PROMPTS
from tests.fakes import Engine, Loop, run_worker, until, worker


def group(group_id: int, *, version: int = 0) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=[1, 2],  # type: ignore[arg-type]
        response_mask=[True, True],  # type: ignore[arg-type]
        behavior_logprobs=[-1.0, -1.0],  # type: ignore[arg-type]
        version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=version),),
        reward=1.0,
    )
    return TrajectoryGroup(group_id=group_id, prompt_tokens=[5], trajectories=(trajectory,) * 2)  # type: ignore[arg-type]


class Prompts:
    """A prompt source at rest: ``outstanding`` groups were published."""

    def __init__(self, outstanding: int = 100) -> None:
        self.exhausted = asyncio.Event()
        self.oldest_start: dict[int, int] = {}
        self._outstanding = {group_id: group_id for group_id in range(outstanding)}

    def state(self) -> PromptState:
        return PromptState(outstanding=self._outstanding)


def counting() -> tuple[Algorithm, list[int]]:
    """grpo, and a list that grows by one for each group that is prepared."""
    calls: list[int] = []

    def function(group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
        calls.extend(np.unique(group))
        return np.zeros(len(sequence))

    return with_advantage(function), calls


def with_advantage(function: Callable[..., NDArray[np.float64]]) -> Algorithm:
    """grpo with the advantages that ``function`` makes of each batch's groups and sequences."""
    row = resolve(ALGORITHMS["grpo"])
    own = Advantage(name="own", function=function, per="batch", needs=("group", "sequence"))
    return dataclasses.replace(row, advantage=own)


class Desk:
    """A feed of batches of two groups, and what it is fed from."""

    def __init__(self, *, max_staleness: int = 2, wait_for_stragglers: bool = False) -> None:
        self.buffer = Buffer(max_staleness=max_staleness)
        self.prompts = Prompts()
        algorithm, self.prepared = counting()
        settings = BatchSettings(
            groups_per_batch=2,
            max_staleness=max_staleness,
            wait_for_stragglers=wait_for_stragglers,
            shares=1,
            micro_batch_tokens=64,
        )
        self.feed = BatchFeed(settings, buffer=self.buffer, prompts=self.prompts, algorithm=algorithm)  # type: ignore[arg-type]
        self.dropped: list[int] = []
        self._sequence = 0

    @contextlib.asynccontextmanager
    async def ahead(self, policy_version: int, *, training: Sequence[Held] = ()) -> AsyncIterator[None]:
        """Inside, batches are prepared ahead, as while a step runs."""
        async with asyncio.TaskGroup() as owner:
            task = owner.create_task(self.feed.prepare_ahead(policy_version, training=training, owner=owner))
            yield
            task.cancel()

    async def prepare(self, groups: Sequence[Held] | None, *, policy_version: int) -> Prepared:
        assert groups is not None
        async with asyncio.TaskGroup() as owner:
            return await self.feed.prepare(groups, policy_version=policy_version, owner=owner)

    def arrive(self, group_id: int, *, version: int = 0) -> None:
        self._sequence += 1
        self.buffer.add(self._sequence, group(group_id, version=version), now=0.0)
        self.feed.wake()

    async def take(self, policy_version: int) -> list[int] | None:
        taken = await self.feed.take(policy_version, drop=self.drop)
        return None if taken is None else ids(taken)

    async def drop(self, stale: Sequence[Held]) -> None:
        self.dropped += ids(stale)


def ids(groups: Sequence[Held]) -> list[int]:
    return [held.group.group_id for held in groups]


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_what_was_prepared_ahead_is_what_is_trained(desk: Desk) -> None:
    for group_id in range(4):
        desk.arrive(group_id)
    training = desk.buffer.take(2)
    assert training is not None
    async with desk.ahead(1, training=training):
        await until(lambda: len(desk.prepared) == 2)
    for held in training:
        desk.buffer.dispose(held)
    assert await desk.take(1) == [2, 3]
    prepared = await desk.prepare(desk.buffer.take(2), policy_version=1)
    assert prepared.batch.metrics["staleness/max"] == 1.0
    assert len(desk.prepared) == 2  # not once more


async def test_a_late_arrival_that_is_older_takes_its_place_in_the_batch(desk: Desk) -> None:
    desk.arrive(7, version=2)
    desk.arrive(8, version=2)
    async with desk.ahead(3):
        await until(lambda: len(desk.prepared) == 2)
        desk.arrive(3, version=1)
        await until(lambda: len(desk.prepared) == 4)
    assert await desk.take(3) == [3, 7]


async def test_a_stale_group_that_arrives_while_others_are_dropped_is_dropped_too(desk: Desk) -> None:
    desk.arrive(0)  # too old for version 3
    desk.arrive(1, version=3)
    desk.arrive(2, version=3)

    async def drop(stale: Sequence[Held]) -> None:
        await desk.drop(stale)
        if 9 not in desk.dropped:
            desk.arrive(9)

    taken = await desk.feed.take(3, drop=drop)
    assert taken is not None
    assert ids(taken) == [1, 2]
    assert desk.dropped == [0, 9]


async def test_a_guess_for_another_version_is_not_used(desk: Desk) -> None:
    desk.arrive(0)
    desk.arrive(1)
    held = desk.buffer.take(2)
    assert (await desk.prepare(held, policy_version=1)).batch.metrics["staleness/max"] == 1.0
    assert (await desk.prepare(held, policy_version=2)).batch.metrics["staleness/max"] == 2.0


async def test_preparing_ahead_takes_and_drops_nothing(desk: Desk) -> None:
    desk.arrive(0)  # too old for version 3
    desk.arrive(1, version=3)
    desk.arrive(2, version=3)
    async with desk.ahead(3):
        await until(lambda: len(desk.prepared) == 2)
    assert sorted(desk.buffer.held) == [0, 1, 2]
    assert len(desk.buffer.groups) == 0
    assert desk.buffer.consumed.watermark == 1
    assert desk.dropped == []
    desk.feed.drain()
    assert await desk.take(3) is None


async def test_a_batch_prepared_ahead_still_waits_for_stragglers() -> None:
    desk = Desk(wait_for_stragglers=True)
    desk.arrive(1, version=2)
    desk.arrive(2, version=2)
    desk.prompts.oldest_start = {0: 0, 1: 2, 2: 2}  # group 0 is out, and over the bound behind the step from version 2
    await desk.prepare(desk.buffer.take(2), policy_version=2)
    taking = asyncio.create_task(desk.take(2))
    await until(lambda: not desk.feed._changed.is_set())
    assert not taking.done()
    desk.arrive(0)
    assert await taking == [0, 1]


async def test_a_learner_that_holds_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_feed, "LONG_WAIT_SECONDS", 0.01)
    desk = Desk(wait_for_stragglers=True)
    desk.arrive(1, version=2)
    desk.arrive(2, version=2)
    desk.prompts.oldest_start = {0: 0, 1: 2, 2: 2}
    taking = asyncio.create_task(desk.take(2))
    await until(lambda: "step 3 has its 2 groups and holds since" in caplog.text)
    assert "rollout workers up" not in caplog.text
    desk.arrive(0)
    assert await taking == [0, 1]


@given(
    versions=st.lists(st.integers(0, 6), max_size=12),
    training=st.sets(st.integers(0, 11)),
    policy_version=st.integers(0, 8),
)
def test_what_is_foreseen_is_what_is_taken_when_nothing_arrives(
    versions: list[int], training: set[int], policy_version: int
) -> None:
    buffer = Buffer(max_staleness=3)
    for group_id, version in enumerate(versions):
        buffer.add(group_id + 1, group(group_id, version=version), now=0.0)
    busy = [held for group_id, held in buffer.held.items() if group_id in training]
    foreseen = buffer.foresee(2, policy_version=policy_version, training=busy)
    for held in busy:
        buffer.dispose(held)
    buffer.evict(policy_version)
    assert foreseen == buffer.take(2)


async def test_a_long_wait_is_announced_with_what_is_missing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_feed, "LONG_WAIT_SECONDS", 0.0)
    desk.arrive(0)
    taking = asyncio.create_task(desk.take(0))
    await until(lambda: bool(caplog.records))
    assert "step 1 trains 2 groups, 1 are here and 99 outstanding, 0 were filtered" in caplog.text
    desk.arrive(1)
    assert await taking == [0, 1]
    assert len(caplog.records) == 1


# -- in the loop -------------------------------------------------------------------------------------------------------


class Pause:
    """Holds the backend's thread in a step."""

    def __init__(self, loop: Loop, *, step: int) -> None:
        self.reached, self._go = threading.Event(), threading.Event()

        def wait(number: int) -> None:
            if number == step:
                self.reached.set()
                self._go.wait()

        loop.backend.before_step = wait

    def end(self) -> None:
        self._go.set()


async def test_the_learner_prepares_the_next_batch_while_a_step_runs(bus_factory: Any, tmp_path: Path) -> None:
    algorithm, prepared = counting()
    loop = Loop(await bus_factory(), tmp_path, steps=3, algorithm=algorithm)
    pause = Pause(loop, step=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_worker(worker(await bus_factory(), Engine())))
        tasks.create_task(loop.run_learner())
        await until(lambda: pause.reached.is_set() and len(prepared) >= 4)
        pause.end()
    assert loop.trained_groups == 6


async def test_a_batch_prepared_ahead_admits_nothing_in_one_step_off(bus_factory: Any, tmp_path: Path) -> None:
    """While step 1 trains batch 1, batch 2 is complete and prepared: batch 3 must not be admitted before step 2."""
    algorithm, prepared = counting()
    loop = Loop(await bus_factory(), tmp_path, steps=4, mode="one_step_off", max_staleness=1, algorithm=algorithm)
    pause = Pause(loop, step=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_worker(worker(await bus_factory(), Engine(), load="on_demand")))
        tasks.create_task(loop.run_learner())
        await until(lambda: len(prepared) == 4)
        assert await loop.bus.last_sequence(PROMPTS) == 4
        pause.end()
    assert max(row["staleness/max"] for row in loop.recorder.rows) == 1
    assert loop.trained_groups == 8


async def test_a_drain_leaves_what_was_prepared_ahead_for_the_next_life(bus_factory: Any, tmp_path: Path) -> None:
    algorithm, prepared = counting()
    loop = Loop(await bus_factory(), tmp_path, steps=4, algorithm=algorithm)
    pause = Pause(loop, step=0)
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    learner = asyncio.create_task(loop.run_learner())
    await until(lambda: len(prepared) >= 4)
    loop.learner.drain()
    pause.end()
    await learner
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    assert found[0].step == 1
    assert found[0].groups == {"watermark": 2, "beyond": []}
    again = Loop(await bus_factory(), tmp_path, steps=4)
    await again.run_learner(resume=True)
    await task
    assert again.backend.steps == 4
    assert again.trained_groups == 6


async def test_a_batch_that_cannot_be_prepared_ends_the_learner(bus_factory: Any, tmp_path: Path) -> None:
    calls = []

    def function(group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("advantages of batch 2")
        return np.zeros(len(sequence))

    loop = Loop(await bus_factory(), tmp_path, algorithm=with_advantage(function))
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(ArithmeticError, match="batch 2"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
