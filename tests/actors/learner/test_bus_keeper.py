"""How the learner reacts to losses of the bus."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncrl.actors.learner import bus_keeper
from asyncrl.actors.learner.bus_keeper import BusKeeper
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Loss
from asyncrl.errors import BusError
from asyncrl.messages.topics import PROGRESS
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.buses import progress


class Forgetful(MemoryBus):
    """A bus that reports the losses that a test sets."""

    def __init__(self) -> None:
        super().__init__(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        self.lost: list[Loss] = []

    async def losses(self, *, repairs: bool = False) -> list[Loss]:
        assert repairs
        found, self.lost = self.lost, []
        return found


class Rig:
    def __init__(self) -> None:
        self.bus, self.suspected, self.restored = Forgetful(), 0, 0
        self.keeper = BusKeeper(self.bus, suspect_prompts=self.suspect, restore_weights=self.restore)

    def suspect(self) -> None:
        self.suspected += 1

    async def restore(self) -> None:
        self.restored += 1


def loss(*topics: str, problem: str = "was deleted", is_repaired: bool = True) -> Loss:
    return Loss(name="a-stream", topics=topics, problem=problem, is_repaired=is_repaired, is_gone=not is_repaired)


@pytest.mark.parametrize(
    ("topics", "suspected"), [(("prompts",), 1), (("trajectories",), 1), (("actors",), 0), (("weights", "progress"), 0)]
)
async def test_prompts_are_looked_for_when_what_they_are_on_was_lost(topics: tuple[str, ...], suspected: int) -> None:
    rig = Rig()
    rig.bus.lost = [loss(*topics)]
    await rig.keeper.repair()
    assert rig.suspected == suspected


async def test_watchers_hear_again_of_states_whose_stream_was_altered() -> None:
    rig = Rig()
    await rig.bus.put(PROGRESS, progress(3))
    async with rig.bus.watch(PROGRESS) as states:
        assert (await anext(states)).step == 3
        heard: asyncio.Future[object] = asyncio.ensure_future(anext(states))
        await rig.keeper.publish_again()  # nothing was lost
        await asyncio.sleep(0)
        assert not heard.done()
        rig.bus.lost = [loss("weights", "progress", problem="was altered: republish")]
        await rig.keeper.repair()
        await rig.keeper.publish_again()
        async with asyncio.timeout(120):
            await heard
    assert rig.restored == 2


async def test_what_cannot_be_made_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for _ in range(3):
        rig.bus.lost = [loss("prompts", is_repaired=False)]
        await rig.keeper.repair()
    assert [record.getMessage() for record in caplog.records] == [
        "the bus: a-stream was deleted; processes that need it wait, and the repair is retried"
    ]
    assert rig.suspected == 0
    rig.bus.lost = [loss("prompts")]
    await rig.keeper.repair()
    assert "it is restored" in caplog.text
    assert rig.suspected == 1


async def test_streams_are_made_again_while_what_was_on_them_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are stored again as soon as the same keeper has recreated their stream."""
    monkeypatch.setattr(bus_keeper, "LOOK_SECONDS", 0.001)
    rig, is_made, restored = Rig(), asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def restore() -> None:
        done.append("weights wait")
        await is_made.wait()
        done.append("weights are stored")
        restored.set()

    async def losses(*, repairs: bool = False) -> list[Loss]:
        if done == ["weights wait"] and repairs:
            done.append("streams are made")
            is_made.set()
        return []

    rig.keeper = BusKeeper(rig.bus, suspect_prompts=rig.suspect, restore_weights=restore)
    rig.bus.losses = losses  # type: ignore[method-assign]
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        keeping = group.create_task(rig.keeper.run())
        await restored.wait()
        keeping.cancel()
    assert done == ["weights wait", "streams are made", "weights are stored"]


async def test_a_bus_that_refuses_a_look_is_said_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bus_keeper, "LOOK_SECONDS", 0.001)
    rig, looks = Rig(), asyncio.Semaphore(0)

    async def losses(*, repairs: bool = False) -> list[Loss]:
        looks.release()
        raise BusError("no quorum")

    rig.bus.losses = losses  # type: ignore[method-assign]
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        keeping = group.create_task(rig.keeper.run())
        for _ in range(5):
            await looks.acquire()
        keeping.cancel()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "the bus: some lost data is not restored yet, retrying: no quorum"
    ]
