"""A batch that cannot be trained is kept, its groups are failed, and the run goes on; two in a row end it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import history
from asyncrl.actors.learner.failed_batches import FOLDER, NOTE_FILE, forget_deaths
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.backends.port import StepResult
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import BackendError, FilterError, HopelessError, StepFailed
from asyncrl.messages import TrajectoryGroup, codec
from asyncrl.policies.audit.accounting import account
from asyncrl.policies.batching.packing import MicroBatch
from tests.actors.learner.test_liar import events
from tests.conftest import BUS_SIZES
from tests.harness.fakes import Backend, Engine, Loop, run_worker, worker
from tests.harness.rows import Rows

Shards = Sequence[Sequence[MicroBatch]]


def prompts_of(shards: Shards) -> set[int]:
    """Return the second token of each sequence, which identifies its prompt: group 0 has prompt 4."""
    return {int(m.tokens[start + 1]) for share in shards for m in share for start in m.boundaries[:-1]}


class Picky(Backend):
    """A backend whose steps call ``fails`` with the prompts of a batch."""

    def __init__(self, fails: Callable[[set[int]], None]) -> None:
        super().__init__()
        self.fails = fails

    def step(self, shares: Shards, *, learning_rate: float, model: str = "policy") -> StepResult:
        self.fails(prompts_of(shares))
        return super().step(shares, learning_rate=learning_rate, model=model)


def with_prompt(bad: int, error: Exception) -> Callable[[set[int]], None]:
    def fails(prompts: set[int]) -> None:
        if bad in prompts:
            raise error

    return fails


def new_loop(backend: Backend, directory: Path, **settings: Any) -> Loop:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, directory, rows=Rows(count=100), **settings)
    loop.backend = backend
    return loop


async def run(loop: Loop, *, resume: bool = False) -> str:
    """Run one incarnation of the learner. Return the BackendError that ended it."""
    helper = asyncio.create_task(run_worker(worker(loop.bus, Engine())))
    try:
        await loop.run_learner(resume=resume)
    except BackendError as error:
        return str(error)
    finally:
        helper.cancel()
        await asyncio.wait((helper,))
    return ""


@pytest.mark.parametrize(
    ("raised", "told"),
    [(RuntimeError("sizes 144 and 192"), "RuntimeError: sizes 144 and 192"), (StepFailed("on rank 1"), "on rank 1")],
)
async def test_keeps_the_batch_fails_its_groups_and_trains_the_next(
    tmp_path: Path, raised: Exception, told: str
) -> None:
    backend = Picky(with_prompt(4 + 3, raised))
    loop = new_loop(backend, tmp_path, groups_per_batch=4)
    assert await run(loop) == ""
    assert backend.steps == 4
    trained = set().union(*(prompts_of([step]) for step in backend.trained))
    assert trained == set(range(8, 24))
    failed = await events(loop.bus, "failed")
    assert [one["group_id"] for one in failed] == [0, 1, 2, 3]
    assert {(one["worker"], one["error"]) for one in failed} == {("w0", f"a training step with it fails: {told}")}
    folder = tmp_path / FOLDER / "step-00000001"
    first, _, trace = (folder / "error.txt").read_text().partition("\n")
    assert first == told and trace.startswith("Traceback") == isinstance(raised, RuntimeError)
    kept = [codec.decode(path.read_bytes(), TrajectoryGroup) for path in sorted(folder.glob("*.msgpack"))]
    assert [one.group_id for one in kept] == [0, 1, 2, 3]
    made = account(history.read(tmp_path / HISTORY_FILE), saved=None, bus=None)
    assert (made.failed, made.trained) == (4, 16)


async def test_two_batches_in_a_row_end_the_run_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(prompts: set[int]) -> None:
        raise RuntimeError("no device")

    loop = new_loop(Picky(fails), tmp_path)
    with pytest.raises(HopelessError) as ended:
        await run(loop)
    folder = tmp_path / FOLDER / "step-00000001"
    assert str(ended.value) == (
        f"two batches in a row could not be trained; the last: RuntimeError: no device; its batch is in {folder}"
    )
    assert loop.backend.steps == 0
    assert [one for one in caplog.records if one.exc_info and one.levelno > logging.INFO] == []  # stderr shows the rest


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (AssertionError("packed wrong"), "AssertionError: packed wrong"),
        (FilterError("algorithm.hooks: 'my:H'.batch raised"), "algorithm.hooks: 'my:H'.batch raised"),
    ],
)
async def test_a_batch_that_cannot_be_prepared_fails_too_and_no_worker_is_blamed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    told: str,
) -> None:
    from asyncrl.actors.learner import preparation

    real = preparation.pack_mini_batches

    def pack(sequences: Any, **settings: Any) -> Any:
        if any(int(sequence.tokens[1]) == 5 for sequence in sequences):
            raise raised
        return real(sequences, **settings)

    monkeypatch.setattr(preparation, "pack_mini_batches", pack)
    loop = new_loop(Picky(lambda prompts: None), tmp_path)
    assert await run(loop) == ""
    assert [one.getMessage() for one in caplog.records if told in one.getMessage()] == [
        f"step 1 failed: {told}; its batch is in {tmp_path / FOLDER / 'step-00000001'}"
    ]
    assert (loop.backend.steps, loop.table.counts["failed"]) == (4, 2)


async def test_a_backend_that_is_gone_ends_the_learner_at_once(tmp_path: Path) -> None:
    loop = new_loop(Picky(with_prompt(5, BackendError("rank 1 ended"))), tmp_path)
    assert await run(loop) == "rank 1 ended"
    assert loop.table.counts["failed"] == 0


async def test_a_batch_that_ends_three_processes_is_failed_by_the_fourth(tmp_path: Path) -> None:
    loop = new_loop(Picky(with_prompt(4 + 2, BackendError("a rank was killed"))), tmp_path, groups_per_batch=4)
    assert [await run(loop, resume=number > 0) for number in range(4)] == ["a rank was killed"] * 3 + [""]
    failed = await events(loop.bus, "failed")
    assert [one["group_id"] for one in failed] == [0, 1, 2, 3]
    assert "3 processes in a row ended while they trained group 0" in failed[0]["error"]
    assert json.loads((tmp_path / NOTE_FILE).read_text()) == {}


async def test_a_batch_that_ended_processes_is_trained_once_its_cause_is_mended(tmp_path: Path) -> None:
    loop = new_loop(Picky(with_prompt(4 + 2, BackendError("a rank was killed"))), tmp_path, groups_per_batch=4)
    assert [await run(loop, resume=number > 0) for number in range(3)] == ["a rank was killed"] * 3
    forget_deaths(tmp_path)  # as `asyncrl run --resume` does
    loop.backend = Picky(lambda prompts: None)
    assert await run(loop, resume=True) == ""
    assert loop.table.counts["failed"] == 0
