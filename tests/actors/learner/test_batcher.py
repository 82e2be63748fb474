"""Batches are prepared during the preceding step; this changes nothing but the time it takes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import batcher
from asyncrl.actors.learner.checkpoint import latest
from tests.harness.desk import Desk, counting, ids
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
