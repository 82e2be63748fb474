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
from numpy.typing import NDArray

from asyncrl.actors.learner import batcher
from asyncrl.actors.learner.batcher import Batcher, Prepared
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.config.learner import LearnerSection
from asyncrl.config.run import DataSection, ModelSection
from asyncrl.config.staleness import StalenessSection
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.topics import PROMPTS
from asyncrl.policies.advantages.advantage import Advantage
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.groups.states import BufferedGroup, Outcome
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.faults import HELD, WORKER
from asyncrl.policies.staleness.adaptive import AdaptiveBound
from asyncrl.state.checkpoint import latest
from tests.harness.fakes import Engine, Loop, run_worker, until, worker


def group(group_id: int, *, version: int = 0) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=[1, 2],  # type: ignore[arg-type]
        response_mask=[True, True],  # type: ignore[arg-type]
        behavior_logprobs=[-1.0, -1.0],  # type: ignore[arg-type]
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
        reward=1.0,
    )
    return TrajectoryGroup(group_id=group_id, prompt_tokens=[5], trajectories=(trajectory,) * 2)  # type: ignore[arg-type]


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

    class Own(Advantage):
        def formula(self, group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
            return function(group, sequence)

    return dataclasses.replace(row, advantage=Own())


class Reporter:
    """Notes what is dropped, and says nothing on any bus."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.after_drop: Callable[[], None] = lambda: None

    async def announce(self, outcome: Outcome) -> None:
        self.dropped += outcome.group_ids

    async def progress(self) -> None:
        self.after_drop()


class Desk:
    """A batcher of batches of two groups, and the table it takes them from, with 100 groups published."""

    def __init__(
        self,
        *,
        max_staleness: int = 2,
        wait_for_stragglers: bool = False,
        version: int = 0,
        wait_seconds: float = 0.0,
    ) -> None:
        run = RunConfig(
            model=ModelSection(path=""),
            data=DataSection(path=""),
            learner=LearnerSection(groups_per_batch=2, micro_batch_tokens=64),
            staleness=StalenessSection(
                max_staleness=max_staleness,
                eviction="wait" if wait_for_stragglers else "drop",
                wait_seconds=wait_seconds,
            ),
        )
        self.table = published(100, version=version)
        self.changed = asyncio.Event()
        algorithm, self.prepared = counting()
        self.reporter = Reporter()
        self.wait = OpenWait("trajectories", WORKER, "", 0.0, 0.0, 0.0)
        self.batcher = Batcher(
            run,
            table=self.table,
            progress=self.reporter,  # type: ignore[arg-type]
            changed=self.changed,
            algorithm=algorithm,
        )
        self._sequence = 0

    @contextlib.asynccontextmanager
    async def ahead(self) -> AsyncIterator[None]:
        """Inside, batches are prepared ahead, as while a step runs."""
        async with asyncio.TaskGroup() as owner:
            task = owner.create_task(self.batcher.prepare_ahead(owner=owner))
            yield
            task.cancel()

    async def prepare(self, groups: Sequence[BufferedGroup]) -> Prepared:
        async with asyncio.TaskGroup() as owner:
            return await self.batcher.prepare(groups, owner=owner)

    def arrive(self, *group_ids: int, version: int = 0) -> None:
        for group_id in group_ids:
            self._sequence += 1
            self.table.arrive(self._sequence, group(group_id, version=version), now=0.0)
        self.changed.set()

    def start(self, *, of: dict[int, int]) -> None:
        """These outstanding groups began at these versions."""
        for group_id, version in of.items():
            self.table.publish(group_id, position=group_id, oldest_start=version)

    async def take(self) -> list[int] | None:
        taken = await self.batcher.take(self.wait)
        return None if taken is None else ids(taken)


def published(count: int, *, version: int = 0) -> GroupTable:
    """A table of ``count`` outstanding groups after ``version`` steps."""
    table = GroupTable(bound=AdaptiveBound.fixed(2), step=version)
    for group_id in range(count):
        table.publish(group_id, position=group_id)
    return table


def ids(groups: Sequence[BufferedGroup]) -> list[int]:
    return [one.group_id for one in groups]


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_what_was_prepared_ahead_is_what_is_trained(desk: Desk) -> None:
    desk.arrive(0, 1, 2, 3)
    assert await desk.take() == [0, 1]
    async with desk.ahead():
        await until(lambda: len(desk.prepared) == 2)
    desk.table.trained(max_staleness=0)
    taken = await desk.batcher.take(desk.wait)
    assert taken is not None
    assert ids(taken) == [2, 3]
    prepared = await desk.prepare(taken)
    assert prepared.batch.metrics["staleness/max"] == 1.0
    assert len(desk.prepared) == 2  # not once more


async def test_a_late_arrival_that_is_older_takes_its_place_in_the_batch() -> None:
    desk = Desk(version=2)
    desk.arrive(20, 21, version=2)
    assert await desk.take() == [20, 21]
    desk.arrive(7, 8, version=2)
    async with desk.ahead():
        await until(lambda: len(desk.prepared) == 2)
        desk.arrive(3, version=1)
        await until(lambda: len(desk.prepared) == 4)
    desk.table.trained(max_staleness=0)
    assert await desk.take() == [3, 7]


async def test_a_stale_group_that_arrives_while_others_are_dropped_is_dropped_too() -> None:
    desk = Desk(version=3)
    desk.arrive(0)  # too old for version 3
    desk.arrive(1, 2, version=3)

    def arrive_late() -> None:
        if 9 not in desk.reporter.dropped:
            desk.arrive(9)

    desk.reporter.after_drop = arrive_late
    assert await desk.take() == [1, 2]
    assert desk.reporter.dropped == [0, 9]


async def test_a_guess_for_another_version_is_not_used(desk: Desk) -> None:
    desk.arrive(0, 1)
    groups = [*desk.table.buffered.values()]
    for version in (1, 2):
        desk.table.step = version
        assert (await desk.prepare(groups)).batch.metrics["staleness/max"] == version


async def test_preparing_ahead_takes_and_drops_nothing() -> None:
    desk = Desk(version=2)
    desk.arrive(20, 21, version=2)
    assert await desk.take() == [20, 21]
    desk.arrive(0)  # too old for version 3
    desk.arrive(1, 2, version=2)
    async with desk.ahead():
        await until(lambda: len(desk.prepared) == 2)
    assert sorted(desk.table.buffered) == [0, 1, 2]
    assert len(desk.table.done) == 0
    assert desk.table.consumed.watermark == 1
    assert desk.reporter.dropped == []
    desk.batcher.drain()
    assert await desk.take() is None


async def test_a_batch_prepared_ahead_still_waits_for_stragglers() -> None:
    desk = Desk(wait_for_stragglers=True, version=2)
    desk.start(of={0: 0, 1: 2, 2: 2})  # group 0 is over the bound after the step from version 2
    desk.arrive(1, 2, version=2)
    await desk.prepare([*desk.table.buffered.values()])
    taking = asyncio.create_task(desk.take())
    await until(lambda: not desk.changed.is_set())
    assert not taking.done()
    desk.arrive(0)
    assert await taking == [0, 1]


async def test_a_learner_that_holds_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batcher, "LONG_WAIT_SECONDS", 0.01)
    desk = Desk(wait_for_stragglers=True, version=2)
    desk.start(of={0: 0, 1: 2, 2: 2})
    desk.arrive(1, 2, version=2)
    taking = asyncio.create_task(desk.take())
    await until(lambda: "step 3 has its 2 groups and waits for older ones" in caplog.text)
    assert "rollout workers up" not in caplog.text
    desk.arrive(0)
    assert await taking == [0, 1]


async def test_a_step_waits_for_stragglers_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """And the steps behind it do not wait for the same ones again."""
    desk = Desk(wait_for_stragglers=True, version=2, wait_seconds=0.01)
    desk.start(of={0: 0, 1: 2, 2: 2, 3: 2, 4: 2})
    desk.arrive(1, 2, 3, 4, version=2)
    assert await desk.take() == [1, 2]
    assert desk.batcher.held_seconds >= 0.01
    assert "step 3 trains without older groups (1) that it has waited 0.01 s for" in caplog.text
    desk.table.trained(max_staleness=0)
    assert await desk.take() == [3, 4]
    assert desk.batcher.held_seconds == 0.0


@pytest.mark.parametrize(("wait_seconds", "note"), [(300.0, HELD), (0.0, "")])
async def test_a_learner_says_that_it_holds_while_it_does_and_only_if_the_hold_has_an_end(
    wait_seconds: float, note: str
) -> None:
    """A health monitor takes it for no deadlock then, whoever keeps what is waited for."""
    desk = Desk(wait_for_stragglers=True, version=2, wait_seconds=wait_seconds)
    desk.start(of={0: 0, 1: 2, 2: 2})
    desk.arrive(1, version=2)
    taking = asyncio.create_task(desk.take())
    await until(lambda: not desk.changed.is_set())
    assert desk.wait.note == ""  # the batch is not full
    desk.arrive(2, version=2)
    await until(lambda: not desk.changed.is_set())
    assert desk.wait.note == note
    desk.arrive(0)
    assert await taking == [0, 1]
    assert desk.wait.note == ""


async def test_a_wait_behind_one_in_vain_is_half_as_long(caplog: pytest.LogCaptureFixture) -> None:
    """So that a run whose every group comes too late is not held for the whole time at every step."""
    desk = Desk(wait_for_stragglers=True, version=2, wait_seconds=0.02)
    desk.start(of={0: 0, 1: 1, **dict.fromkeys(range(2, 8), 2)})
    desk.arrive(*range(2, 8), version=2)
    for _ in range(2):
        await desk.take()
        desk.table.trained(max_staleness=0)
    assert "it has waited 0.02 s for" in caplog.text and "it has waited 0.01 s for" in caplog.text


async def test_a_resumed_learner_does_not_wait_for_what_is_too_old_already() -> None:
    desk = Desk(wait_for_stragglers=True, version=5)
    desk.start(of={0: 2, 1: 5, 2: 5})
    desk.arrive(1, 2, version=5)
    assert await desk.take() == [1, 2]
    assert desk.batcher.held_seconds == 0.0


async def test_stragglers_of_several_batches_are_waited_for_once_all_together() -> None:
    """Three from version 0 and two to a batch: the third would be too late already for the step after the next."""
    desk = Desk(wait_for_stragglers=True, version=1, wait_seconds=0.01)
    desk.start(of={0: 0, 1: 0, 2: 0, **dict.fromkeys(range(3, 9), 1)})
    desk.arrive(*range(3, 9), version=1)
    held = []
    for _ in range(2):
        assert await desk.take() is not None
        held.append(desk.batcher.held_seconds > 0)
        desk.table.trained(max_staleness=0)
    assert held == [True, False]


async def test_a_long_wait_is_announced_with_what_is_missing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batcher, "LONG_WAIT_SECONDS", 0.0)
    desk.arrive(0)
    taking = asyncio.create_task(desk.take())
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
