"""Batches are prepared during the preceding step; this changes nothing but the time it takes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.actors.learner import batcher
from asyncrl.actors.learner.checkpoint import latest
from asyncrl.errors import HopelessError
from asyncrl.messages.topics import PROMPTS
from tests.harness.desk import Desk, counting, ids, with_advantage
from tests.harness.fakes import Engine, Loop, run_worker, until, worker


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
    assert len(desk.prepared) == 2  # not prepared again


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
    """Blocks the backend's thread during a step."""

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
    """During step 1 on batch 1, batch 2 is complete and prepared. Batch 3 must not be admitted before step 2."""
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


async def test_batches_that_cannot_be_prepared_end_the_learner(bus_factory: Any, tmp_path: Path) -> None:
    calls = []

    def function(group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("advantages of batch 2")
        return np.zeros(len(sequence))

    loop = Loop(await bus_factory(), tmp_path, algorithm=with_advantage(function))
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(HopelessError, match="batch 2"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
