"""Learner and engines on the same GPUs: one side at a time has its memory there, and both progress (run.colocated)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

from asyncrl.actors.gpu_turn import GpuTurn
from asyncrl.actors.rollout.step_pause import StepPause
from asyncrl.config.run import EngineSection, Mode
from asyncrl.engines.generation import Generation
from asyncrl.errors import ConfigError, EngineDied, EngineError
from asyncrl.launch import colocated
from asyncrl.launch.colocated import TurnTakingEngine
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.weights.port import LoadReport
from tests.harness.fakes import Backend, Engine, Loop, run_all, until, worker

PROMPT = np.array([1], dtype=np.int32)


class Gpus:
    """Tracks which side has memory on the GPUs. Asserts that learner and engines never both do."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.events: list[str] = []

    def arrive(self, who: str) -> None:
        self.there.add(who)
        assert self.there == {"learner"} or "learner" not in self.there, self.events
        self.events.append(f"{who} comes")

    def leave(self, who: str) -> None:
        self.there.remove(who)
        self.events.append(f"{who} leaves")


class SharingEngine(Engine):
    def __init__(self, gpus: Gpus, name: str = "engine") -> None:
        super().__init__()
        self._gpus, self._name = gpus, name
        self.has_cache = True

    async def start(self) -> None:
        self._gpus.arrive(self._name)

    async def release(self) -> None:
        assert not self.running
        self._gpus.leave(self._name)

    async def resume(self, *, has_cache: bool = True) -> None:
        if self._name not in self._gpus.there:
            self._gpus.arrive(self._name)
        self.has_cache = has_cache

    async def generate(self, *arguments: Any, **named: Any) -> Generation:
        assert self._name in self._gpus.there and self.has_cache
        return await super().generate(*arguments, **named)

    async def load(self, weights: WeightVersion) -> LoadReport:
        assert self._name in self._gpus.there
        self._gpus.events.append(f"{self._name} loads {weights.policy_version}")
        return await super().load(weights)


class SharingBackend(Backend):
    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus
        self.before_step = self._begin

    def _begin(self, steps: int) -> None:
        assert "learner" in self._gpus.there
        self._gpus.events.append(f"step {steps + 1}")

    def start(self) -> None:
        self._gpus.arrive("learner")

    def onload(self) -> None:
        self._gpus.arrive("learner")

    def offload(self) -> None:
        self._gpus.leave("learner")

    def save(self, folder: Path) -> None:
        assert "learner" in self._gpus.there
        super().save(folder)


def taking_turns(engine: SharingEngine, directory: Path) -> Any:
    return TurnTakingEngine(engine, memory=engine, turn=GpuTurn(directory / colocated.LOCK_FILE, is_shared=True))


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
async def test_one_side_at_a_time_is_on_the_gpus_and_every_step_is_trained(
    loop: Loop, bus_factory: Any, mode: Mode
) -> None:
    loop.mode, loop.is_colocated, loop.checkpoint_every = mode, True, 2
    gpus = Gpus()
    loop.backend = SharingBackend(gpus)
    engines = [SharingEngine(gpus, f"engine {number}") for number in range(2)]
    workers = [
        worker(
            await bus_factory(),
            taking_turns(engine, loop.directory),
            name=f"w{number}",
            load="on_demand",
            max_staleness=0 if mode == "sync" else 1,
        )
        for number, engine in enumerate(engines)
    ]
    await run_all(loop, *workers)
    assert loop.backend.steps == 4
    assert all(row["staleness/dropped_groups"] == 0 for row in loop.recorder.rows)
    assert [event for event in gpus.events if event.startswith("step")] == [f"step {step}" for step in (1, 2, 3, 4)]
    if mode == "sync":
        assert [row["staleness/max"] for row in loop.recorder.rows] == [0.0] * 4
        assert any("loads 3" in event for event in gpus.events)


async def test_an_engine_stays_while_more_is_asked_of_it_and_leaves_before_its_last_answer(tmp_path: Path) -> None:
    gpus = Gpus()
    engine = SharingEngine(gpus)
    shared = taking_turns(engine, tmp_path)
    await shared.start()
    assert gpus.there == set()
    sampling = SamplingParams(max_new_tokens=4)
    engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(shared.generate(PROMPT, sampling, seed=seed)) for seed in range(3)]
        while engine.running < 3:
            await asyncio.sleep(0)
        learner = GpuTurn(tmp_path / colocated.LOCK_FILE, is_shared=False)
        turn = group.create_task(learner.acquire())
        await asyncio.sleep(0)
        assert not learner.is_held
        engine.gate.set()
        await asyncio.wait(answers)
        assert gpus.events == ["engine comes", "engine leaves"] * 2
        await turn
        waiting = group.create_task(shared.generate(PROMPT, sampling, seed=3))
        while not shared.stats().queued:
            await asyncio.sleep(0)
        assert shared.stats().is_away
        learner.release()
        await waiting


@pytest.mark.parametrize("offload", ["learner", "engines"])
async def test_the_side_that_stays_keeps_its_memory_and_still_takes_turns(
    loop: Loop, bus_factory: Any, offload: Literal["learner", "engines"]
) -> None:
    loop.mode, loop.is_colocated, loop.offload = "sync", True, offload
    moves: list[str] = []

    class Moved(Backend):
        def onload(self) -> None:
            moves.append("learner")

        def offload(self) -> None:
            moves.append("learner")

    class MovedEngine(Engine):
        async def release(self) -> None:
            moves.append("engines")

        async def resume(self, *, has_cache: bool = True) -> None:
            moves.append("engines")

    loop.backend = Moved()
    engine: Any = colocated.engine(loop.run, cast(Any, MovedEngine()))
    await run_all(loop, worker(await bus_factory(), engine, load="on_demand", max_staleness=0))
    assert loop.backend.steps == 4
    assert set(moves) == {offload}


async def test_weights_are_loaded_before_the_cache_of_keys_and_values_comes_back(tmp_path: Path) -> None:
    engine = SharingEngine(Gpus())
    shared = taking_turns(engine, tmp_path)
    await shared.start()
    had_cache: list[bool] = []
    load = engine.load

    async def noting(weights: WeightVersion) -> LoadReport:
        had_cache.append(engine.has_cache)
        return await load(weights)

    engine.load = noting  # type: ignore[method-assign]
    answer = asyncio.create_task(shared.generate(PROMPT, SamplingParams(max_new_tokens=4), seed=0))
    await shared.load(WeightVersion(incarnation=0, policy_version=1))
    await answer
    await shared.load(WeightVersion(incarnation=0, policy_version=2))
    assert had_cache[-1] is False


async def test_an_engine_that_has_loaded_stays_for_the_answers_that_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated, "AFTER_LOAD_SECONDS", 1e6)
    gpus = Gpus()
    shared = taking_turns(SharingEngine(gpus), tmp_path)
    await shared.start()
    await shared.load(WeightVersion(incarnation=0, policy_version=1))
    await shared.generate(PROMPT, SamplingParams(max_new_tokens=4), seed=0)
    assert gpus.events[2:] == ["engine comes", "engine loads 1", "engine leaves"]


async def test_an_engine_that_has_loaded_for_nobody_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "AFTER_LOAD_SECONDS", 0.0)
    gpus = Gpus()
    shared = taking_turns(SharingEngine(gpus), tmp_path)
    await shared.start()
    await shared.load(WeightVersion(incarnation=0, policy_version=1))
    await _the_learners_turn(tmp_path)
    assert not gpus.there and shared.stats().is_away


async def _the_learners_turn(folder: Path) -> None:
    learner = GpuTurn(folder / colocated.LOCK_FILE, is_shared=False)
    async with asyncio.timeout(60):
        await learner.acquire()
    learner.release()


class Staying(SharingEngine):
    is_busy = False

    async def release(self) -> None:
        if self.is_busy:
            raise EngineError("the server is busy")
        await super().release()


async def test_an_engine_that_does_not_leave_after_a_load_ends_and_its_turn_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated, "AFTER_LOAD_SECONDS", 0.0)
    engine = Staying(Gpus())
    shared = taking_turns(engine, tmp_path)
    await shared.start()
    engine.is_busy = True
    await shared.load(WeightVersion(incarnation=0, policy_version=1))
    await _the_learners_turn(tmp_path)
    assert engine.closed


async def test_an_engine_that_does_not_leave_the_gpus_ends_and_its_turn_with_it(tmp_path: Path) -> None:
    """Otherwise the learner, which has all answers but one, would wait for the turn for ever."""
    engine = Staying(Gpus())
    shared = taking_turns(engine, tmp_path)
    await shared.start()
    engine.is_busy = True
    with pytest.raises(EngineDied, match="does not leave the GPUs: the server is busy"):
        await shared.generate(PROMPT, SamplingParams(max_new_tokens=4), seed=0)
    await shared.close()
    await _the_learners_turn(tmp_path)


class PausingEngine(Engine):
    async def pause(self) -> None:
        self.gate.clear()

    async def unpause(self) -> None:
        self.gate.set()


async def test_an_engine_pauses_for_each_step_and_everything_is_trained(loop: Loop, bus_factory: Any) -> None:
    loop.beside_learner = "pause"
    engine = PausingEngine()
    turn = colocated.step_turn(loop.run, is_shared=True)
    assert turn is not None
    pause = StepPause("w0.pause", await bus_factory(), engine=engine, turn=turn)

    steps = []

    def until_paused(step: int) -> None:  # in the backend's thread
        while engine.gate.is_set():
            time.sleep(0.001)
        steps.append(step + 1)

    loop.backend.before_step = until_paused
    task = asyncio.create_task(pause.run())
    await run_all(loop, worker(await bus_factory(), engine))
    await until(engine.gate.is_set)
    task.cancel()
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize("ends", ["worker", "learner"])
async def test_an_engine_goes_on_when_its_worker_or_its_learner_ends_during_a_step(
    bus: Any, tmp_path: Path, ends: str
) -> None:
    engine = PausingEngine()
    learner, turn = (GpuTurn(tmp_path / colocated.STEP_FILE, is_shared=is_shared) for is_shared in (False, True))
    await learner.acquire()
    task = asyncio.create_task(StepPause("w0.pause", bus, engine=engine, turn=turn).run())
    await until(lambda: not engine.gate.is_set())
    if ends == "worker":
        task.cancel()
        await asyncio.wait((task,))
    else:
        learner.release()
        await until(engine.gate.is_set)
        task.cancel()
    assert engine.gate.is_set()
    assert learner.is_held == (ends == "worker")
    learner.release()


async def test_without_the_key_no_lock_is_taken(loop: Loop) -> None:
    assert colocated.step_turn(loop.run, is_shared=False) is None
    loop.beside_learner = "pause"
    with pytest.raises(ConfigError, match='rollout.beside_learner: engine.kind = "none" cannot pause; use "sample"'):
        colocated.check(dataclasses.replace(loop.run, engine=EngineSection(kind="none")))
