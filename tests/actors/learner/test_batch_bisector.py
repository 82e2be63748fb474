"""A step that fails because of some groups: these groups are named and failed, all other groups are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.batch_bisector import find
from asyncrl.backends.port import StepResult
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import BackendError, StepFailed
from asyncrl.policies.batching.packing import MicroBatch
from tests.actors.learner.test_liar import events
from tests.conftest import BUS_SIZES
from tests.harness.fakes import Backend, Engine, Loop, run_worker, worker
from tests.harness.groups import group
from tests.harness.rows import Rows

Shards = Sequence[Sequence[MicroBatch]]


def prompts_of(shards: Shards) -> set[int]:
    """Return the second token of each document, which identifies its prompt."""
    return {int(m.tokens[start + 1]) for share in shards for m in share for start in m.boundaries[:-1]}


class Picky(Backend):
    """A backend whose steps and rehearsals call ``fails`` with the prompts of a batch."""

    def __init__(self, fails: Callable[[set[int]], None]) -> None:
        super().__init__()
        self.fails = fails
        self.rehearsed: list[set[int]] = []

    def step(self, shares: Shards, *, learning_rate: float, model: str = "policy") -> StepResult:
        self.fails(prompts_of(shares))
        return super().step(shares, learning_rate=learning_rate, model=model)

    def rehearse(self, dp_shards: Shards, *, model: str = "policy") -> StepResult:
        self.rehearsed.append(prompts_of(dp_shards))
        self.fails(self.rehearsed[-1])
        return StepResult(metrics={})


class Scoring(Backend):
    """A backend that cannot rehearse; its scores raise the same errors as its steps."""

    def __init__(self, fails: Callable[[set[int]], None]) -> None:
        super().__init__()
        self.fails = fails
        self.before_step = lambda step: None

    def step(self, shares: Shards, *, learning_rate: float, model: str = "policy") -> StepResult:
        self.fails(prompts_of(shares))
        return super().step(shares, learning_rate=learning_rate, model=model)

    def score(self, shares: Shards, *, model: str = "policy") -> Any:
        self.fails(prompts_of(shares))
        return super().score(shares, model=model)


def with_prompt(bad: int, error: Exception) -> Callable[[set[int]], None]:
    def fails(prompts: set[int]) -> None:
        if bad in prompts:
            raise error

    return fails


async def train(backend: Backend, directory: Path, *, steps: int = 4, **settings: Any) -> Loop:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, directory, steps=steps, rows=Rows(count=100), **settings)
    loop.backend = backend
    helper = asyncio.create_task(run_worker(worker(bus, Engine())))
    try:
        await loop.run_learner()
    finally:
        helper.cancel()
        await asyncio.wait((helper,))
    return loop


@pytest.mark.parametrize("kind", [Picky, Scoring])
async def test_a_group_that_no_step_can_be_made_with_is_failed_and_the_others_are_trained(
    kind: type[Picky | Scoring], tmp_path: Path
) -> None:
    backend = kind(with_prompt(4 + 3, RuntimeError("sizes 144 and 192")))
    loop = await train(backend, tmp_path, groups_per_batch=4)
    assert backend.steps == 4
    trained = set().union(*(prompts_of([step]) for step in backend.trained))
    assert trained == set(range(4, 21)) - {4 + 3}
    (failed,) = await events(loop.bus, "failed")
    assert (failed["group_id"], failed["worker"]) == (3, "w0")
    assert failed["error"] == "a training step with it fails: RuntimeError: sizes 144 and 192"
    assert loop.table.counts["failed"] == 1


async def test_a_group_that_was_dropped_while_another_was_told_of_is_not_failed_too(tmp_path: Path) -> None:
    """The task that reads the log quarantined its worker."""
    loop = Loop(MemoryBus(**BUS_SIZES, max_message_bytes=2**20), tmp_path)
    reader: Any = loop.build()._reader
    table = loop.table
    for number in range(2):
        table.publish(number, position=number)
        table.arrive(number + 1, group(number), now=0.0)
    announce = reader._progress.announce

    async def meanwhile(outcome: Any) -> None:
        await announce(outcome)
        if 1 in table.buffered:
            await announce(table.drop([table.buffered[1]], reason="quarantined"))

    reader._progress.announce = meanwhile
    await reader.reject({0: "bad", 1: "bad"})
    await loop.learner.stop()
    assert (table.counts["failed"], table.counts["dropped"], table.buffered) == (1, 1, {})


async def test_several_bad_groups_of_one_batch_are_all_found(tmp_path: Path) -> None:
    def fails(prompts: set[int]) -> None:
        if prompts & {4, 7, 8, 11}:
            raise StepFailed("on another rank")

    backend = Picky(fails)
    loop = await train(backend, tmp_path, groups_per_batch=4)
    assert backend.steps == 4
    assert sorted(event["group_id"] for event in await events(loop.bus, "failed")) == [0, 3, 4, 7]


async def test_a_batch_of_nothing_but_bad_groups_is_failed_when_another_group_can_be_trained(tmp_path: Path) -> None:
    def fails(prompts: set[int]) -> None:
        if prompts & {6, 7}:
            raise ValueError("bad")

    backend = Picky(fails)
    loop = await train(backend, tmp_path, groups_per_batch=2)
    assert backend.steps == 4
    assert loop.table.counts["failed"] == 2


@pytest.mark.parametrize("attempts", [3, 5, 7])
async def test_no_group_is_blamed_for_a_machine_that_has_no_memory_for_some_attempts(
    attempts: int, tmp_path: Path
) -> None:
    """Memory returns in the middle of the bisection: earlier attempts failed, later attempts pass."""
    left = [attempts]

    def fails(prompts: set[int]) -> None:
        if 6 in prompts or left[0] < attempts:  # from group 2 on
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("not enough memory")

    loop = await train(Picky(fails), tmp_path, groups_per_batch=4)
    assert loop.backend.steps == 4
    assert loop.table.counts["failed"] == 0


async def test_an_error_that_every_group_shows_is_raised_as_it_is(tmp_path: Path) -> None:
    def fails(prompts: set[int]) -> None:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        await train(Picky(fails), tmp_path)


async def test_a_backend_that_is_gone_is_raised_at_once(tmp_path: Path) -> None:
    backend = Picky(with_prompt(5, BackendError("rank 1 ended")))
    with pytest.raises(BackendError, match="rank 1 ended"):
        await train(backend, tmp_path)
    assert backend.rehearsed == []


async def test_a_batch_that_fails_once_and_none_of_its_groups_alone_is_trained_the_second_time(tmp_path: Path) -> None:
    errors = [RuntimeError("out of memory")]
    backend = Picky(lambda prompts: None)
    backend.before_step = lambda step: _raise(errors.pop()) if errors else None
    loop = await train(backend, tmp_path)
    assert backend.steps == 4
    assert loop.table.counts["failed"] == 0


async def test_a_batch_that_fails_twice_and_none_of_its_groups_alone_is_raised(tmp_path: Path) -> None:
    backend = Picky(lambda prompts: None)
    backend.before_step = lambda step: _raise(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        await train(backend, tmp_path)
    assert backend.steps == 0


def _raise(error: Exception) -> None:
    raise error


async def test_a_group_whose_loss_is_not_finite_is_failed_and_its_step_is_not_skipped(tmp_path: Path) -> None:
    class Overflowing(Picky):
        def step(self, shares: Shards, *, learning_rate: float, model: str = "policy") -> StepResult:
            if 5 in prompts_of(shares):
                return StepResult(metrics={"learner/skipped_steps": 1.0, "loss": np.nan})
            return super().step(shares, learning_rate=learning_rate, model=model)

        def rehearse(self, dp_shards: Shards, *, model: str = "policy") -> StepResult:
            return StepResult(metrics={"learner/skipped_steps": float(5 in prompts_of(dp_shards))})

    loop = await train(Overflowing(lambda prompts: None), tmp_path)
    assert loop.backend.steps == 4
    assert await events(loop.bus, "skipped") == []
    (failed,) = await events(loop.bus, "failed")
    assert (failed["group_id"], "not finite" in failed["error"]) == (1, True)


async def test_a_batch_that_cannot_be_prepared_is_bisected_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.actors.learner import batcher

    real = batcher.pack_parts

    def pack(documents: Any, **settings: Any) -> Any:
        if any(int(document.tokens[1]) == 5 for document in documents):
            raise AssertionError("packed wrong")
        return real(documents, **settings)

    monkeypatch.setattr(batcher, "pack_parts", pack)
    loop = await train(Picky(lambda prompts: None), tmp_path)
    assert loop.backend.steps == 4
    assert loop.table.counts["failed"] == 1


async def test_the_same_batch_is_always_halved_in_the_same_way() -> None:
    async def halves() -> list[list[int]]:
        tried: list[list[int]] = []

        async def attempt(groups: Any) -> str:
            tried.append([one.group_id for one in groups])
            return "bad" if any(one.group_id == 5 for one in groups) else ""

        made: Any = [type("Group", (), {"group_id": number})() for number in range(8)]
        assert await find(made, attempt) == {5: "bad"}
        return tried

    first = await halves()
    assert first == await halves()
    assert len(first) == 7  # 8, 4 + 4, 2 + 2, 1 + 1
