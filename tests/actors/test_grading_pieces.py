"""Groups larger than a message, and the reward workers that grade them, on both buses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.actors.grading import pieces, reward_worker, rewards_elsewhere
from asyncrl.actors.grading.rewards_elsewhere import asked, samples_of
from asyncrl.bus.port import Bus
from asyncrl.errors import MessageError, RewardError
from asyncrl.messages import replace
from asyncrl.messages.pieces import Piece
from asyncrl.messages.topics import GRADING, GRADING_PIECES
from tests.actors.test_reward_worker import Judge, elsewhere, samples
from tests.actors.test_reward_worker import reward_worker as at_work
from tests.conftest import MAX_MESSAGE_BYTES
from tests.harness.buses import until_acked

Open = Callable[..., Any]
LONG = "a" * int(2.5 * MAX_MESSAGE_BYTES)


async def test_a_group_larger_than_a_message_is_graded_and_leaves_nothing_behind(bus_factory: Open) -> None:
    bus, other = await bus_factory(), await bus_factory()
    judge = Judge()
    async with at_work(other, judge):
        rewards = await big(bus, "b", "cd")
        await until_acked(bus, GRADING)
    assert [reward.value for reward in rewards] == [len(LONG) + 1.0, len(LONG) + 2.0]
    assert [len(one) for one in judge.asked] == [len(LONG) + 1]
    assert await bus.states(GRADING_PIECES) == {}


async def big(bus: Bus, *texts: str) -> Any:
    return await elsewhere(bus, largest=1e9)(samples(*(text + LONG for text in texts)))


async def test_a_large_group_whose_worker_is_killed_is_graded_and_its_pieces_go(bus_factory: Open) -> None:
    bus, other = await bus_factory(), await bus_factory()
    asking = asyncio.create_task(big(bus, "b"))
    while not await bus.depth(GRADING):
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait((asking,))
    assert len(await bus.states(GRADING_PIECES)) == 3
    judge = Judge()
    async with at_work(other, judge):
        while await bus.states(GRADING_PIECES):
            await asyncio.sleep(0.01)
        (reward,) = await big(bus, "b")  # the worker that takes over finds the grade
    assert reward.value == len(LONG) + 1
    assert len(judge.asked) == 1
    assert await bus.states(GRADING_PIECES) == {}


async def test_a_large_group_that_waits_for_long_still_has_its_pieces(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_elsewhere, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(rewards_elsewhere, "PIECES_AGAIN_SECONDS", 0.1)
    asking = asyncio.create_task(big(bus, "b"))
    while not await bus.depth(GRADING):
        await asyncio.sleep(0.01)
    key = next(iter(await bus.states(GRADING_PIECES))).partition("/")[0]
    await bus.forget(GRADING_PIECES, key=f"{key}/")  # the pieces have expired
    while len(await bus.states(GRADING_PIECES)) < 3:
        await asyncio.sleep(0.01)
    async with at_work(bus, Judge()):
        (reward,) = await asking
    assert reward.value == len(LONG) + 1


async def test_a_request_without_its_pieces_fails_with_the_reason(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_worker, "PIECES_SECONDS", 0.01)
    asking = asyncio.create_task(big(bus, "b"))
    while not await bus.depth(GRADING):
        await asyncio.sleep(0.01)
    key = next(iter(await bus.states(GRADING_PIECES))).partition("/")[0]
    await bus.forget(GRADING_PIECES, key=f"{key}/1")
    async with at_work(bus, Judge()):
        with pytest.raises(RewardError, match="does not decode: pieces of it are not on the bus"):
            await asking
    assert await bus.states(GRADING_PIECES) == {}


async def test_what_was_asked_is_what_comes_out_of_its_pieces_or_it_is_refused(bus: Bus) -> None:
    request = asked(samples("b" + LONG, "c"), worker="w0")
    key = request.key()
    sent = await pieces.in_pieces(bus, request, key=key)
    assert sent.in_pieces is not None and not sent.rollouts
    found = await pieces.whole(bus, sent, key=key)
    assert found is not None and found.key() == key
    assert [one.completion for one in samples_of(found)] == ["b" + LONG, "c"]
    await bus.put(GRADING_PIECES, Piece(data=b"evil"), key=f"{key}/1")
    with pytest.raises(MessageError, match="piece 1 of it is damaged"):
        await pieces.whole(bus, sent, key=key)
    small = asked(samples("b"), worker="w0")
    assert await pieces.in_pieces(bus, small, key=small.key()) is small
    with pytest.raises(MessageError, match="there is nothing to grade, or it is there twice"):
        replace(small, in_pieces=sent.in_pieces)
