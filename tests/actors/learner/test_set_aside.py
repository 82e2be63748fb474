"""A log entry that ends the learner's process twice is set aside by the third incarnation; all other groups are
trained."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import BackendError
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.audit.accounting import account
from asyncrl.state import history
from asyncrl.state.history import HISTORY_FILE
from asyncrl.state.in_progress import IN_PROGRESS_FILE
from tests.actors.learner.test_batch_bisector import Picky, prompts_of, with_prompt
from tests.actors.learner.test_liar import events
from tests.conftest import BUS_SIZES
from tests.harness.fakes import Engine, Loop, run_worker, worker
from tests.harness.rows import Rows


class Deadly(Picky):
    """A backend whose process ends when it steps on or rehearses this prompt."""

    def __init__(self, prompt: int) -> None:
        super().__init__(self._end)
        self.prompt = prompt

    def _end(self, prompts: set[int]) -> None:
        if self.prompt in prompts:
            raise BackendError("a rank was killed")


async def live(loop: Loop, *, resume: bool) -> str:
    """Run one incarnation of the learner. Return why it ended."""
    helper = asyncio.create_task(run_worker(worker(loop.bus, Engine())))
    try:
        await loop.run_learner(resume=resume)
    except BackendError as error:
        return str(error)
    finally:
        helper.cancel()
        await asyncio.wait((helper,))
    return ""


async def test_the_group_that_two_incarnations_ended_with_fails_in_the_third_and_its_worker_is_named(
    tmp_path: Path,
) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=4, rows=Rows(count=100), groups_per_batch=4)
    loop.backend = Deadly(4 + 2)
    ended = [await live(loop, resume=number > 0) for number in range(3)]
    assert ended == ["a rank was killed", "a rank was killed", ""]
    trained = set().union(*(prompts_of([step]) for step in loop.backend.trained))
    assert trained == set(range(4, 21)) - {4 + 2}  # all other groups of its batch
    (failed,) = await events(bus, "failed")
    assert (failed["group_id"], failed["worker"]) == (2, "w0")
    assert "two incarnations" in failed["error"]
    (line,) = [line for line in (tmp_path / HISTORY_FILE).read_text().splitlines() if '"failed"' in line]
    assert json.loads(line)["cause"] == "set aside"
    made = account(history.read(tmp_path / HISTORY_FILE), saved=None, bus=None)
    assert (made.failed, made.set_aside) == (1, 1)


async def test_the_second_life_tries_alone_what_the_first_ended_with(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=2, rows=Rows(count=100), groups_per_batch=4)
    loop.backend = backend = Deadly(4 + 2)
    await live(loop, resume=False)
    assert backend.rehearsed == []
    await live(loop, resume=True)
    assert backend.rehearsed == [{4}, {5}, {6}]
    note = json.loads((tmp_path / IN_PROGRESS_FILE).read_text())
    assert [entry[1] for entry in note["training"]] == ["2"]


async def test_a_batch_that_ends_three_lives_though_none_of_its_groups_does_alone_is_set_aside_whole(
    tmp_path: Path,
) -> None:
    class Together(Deadly):
        def _end(self, prompts: set[int]) -> None:
            if {4, 5} <= prompts:
                raise BackendError("a rank was killed")

    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=3, rows=Rows(count=100))
    loop.backend = Together(0)
    ended = [await live(loop, resume=number > 0) for number in range(4)]
    assert ended == ["a rank was killed"] * 3 + [""]
    assert sorted(event["group_id"] for event in await events(bus, "failed")) == [0, 1]


async def test_an_entry_that_is_never_decoded_again_is_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding it ends the process, here through an error that is never caught."""
    from asyncrl.bus import encoding, pieces

    decoded: list[int] = []

    def decode(data: bytes, topic: Any, **settings: Any) -> Any:
        made: Any = encoding.opened(data, topic, **settings)
        if topic is TRAJECTORIES and made.message is not None:
            decoded.append(made.message.group_id)
            if made.message.group_id == 1:
                raise BackendError("the decoder crashed")
        return made

    monkeypatch.setattr(pieces, "opened", decode)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=3, rows=Rows(count=100))
    ended = [await live(loop, resume=number > 0) for number in range(3)]
    assert ended == ["the decoder crashed", "the decoder crashed", ""]
    assert decoded.count(1) == 2
    (failed,) = await events(bus, "failed")
    assert failed["group_id"] == 1


async def test_an_end_that_comes_from_elsewhere_while_groups_are_tried_suspects_nobody(tmp_path: Path) -> None:
    """The step fails. While halves of its batch are rehearsed, another task loses the bus."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=4, rows=Rows(count=100))
    loop.backend = backend = Picky(lambda prompts: None)
    going: list[asyncio.Task[str]] = []
    events_loop, is_cancelled = asyncio.get_running_loop(), threading.Event()

    def cancel() -> None:
        going[0].cancel()
        events_loop.call_soon(is_cancelled.set)

    def fails(prompts: set[int]) -> None:
        if backend.rehearsed and not is_cancelled.is_set():
            events_loop.call_soon_threadsafe(cancel)
            is_cancelled.wait()
        with_prompt(4, RuntimeError("bad"))(prompts)

    backend.fails = fails
    going.append(asyncio.create_task(live(loop, resume=False)))
    await asyncio.wait(going)
    note = json.loads((tmp_path / IN_PROGRESS_FILE).read_text())
    assert note["training"] == []


async def test_what_is_cancelled_or_drained_in_the_midst_of_a_step_suspects_nobody(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=4, rows=Rows(count=100))
    loop.backend.before_step = lambda step: loop.learner.drain() if step == 1 else None
    assert await live(loop, resume=False) == ""
    note = json.loads((tmp_path / IN_PROGRESS_FILE).read_text())
    assert (note["training"], note["decoding"]) == ([], [])
