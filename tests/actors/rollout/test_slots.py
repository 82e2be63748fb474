"""Slots: groups begin when there is room; rewards and own time of functions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from asyncrl.actors.rollout.generation_session import OwnTime
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.rewards.port import Reward, Sample
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.buses import publish_prompts


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_group_starts_once_one_slot_is_free() -> None:
    slots = SampleSlots(4)
    first = await slots.take(4)
    second = asyncio.create_task(slots.take(3))
    await settle()
    assert not second.done()
    first.release()
    assert (slots.has_free, slots.num_free) == (True, 1)
    (await second).close()
    assert slots.num_free == 1  # 3 samples of the first group are in progress
    first.close()
    first.close()
    assert slots.num_free == 4


async def test_group_alone_waits_for_others_and_keeps_others_out() -> None:
    slots = SampleSlots(8)
    running = await slots.take(2)
    alone = asyncio.create_task(slots.take_alone(2))
    await settle()
    late = asyncio.create_task(slots.take(1))
    await settle()
    assert (alone.done(), late.done(), slots.is_reserved) == (False, False, True)
    running.close()
    lease = await alone
    lease.release()
    lease.release()
    await settle()
    assert not late.done()  # its samples are done, but it is not rewarded yet
    lease.close()
    await late
    assert not slots.is_reserved


async def test_cancelled_wait_for_the_worker_lets_others_in() -> None:
    slots = SampleSlots(8)
    running = await slots.take(2)
    waiting = [asyncio.create_task(slots.take_alone(2)) for _ in range(2)]
    await settle()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not slots.is_reserved
    (await slots.take(1)).close()
    running.close()
    assert slots.num_free == 8


async def test_group_alone_has_all_stages() -> None:
    training = SampleSlots(8)
    evaluation = SampleSlots(8, beside=training)
    running = await training.take(2)
    assert (evaluation.num_free, evaluation.num_running_beside, training.num_running_beside) == (8, 2, 0)
    alone = asyncio.create_task(evaluation.take_alone(1))
    late = asyncio.create_task(training.take(1))
    await settle()
    assert (alone.done(), late.done(), training.has_free) == (False, False, False)
    running.close()
    lease = await alone
    await settle()
    assert not late.done()
    unreserved = asyncio.create_task(training.until_unreserved())
    await settle()
    assert not unreserved.done()
    lease.close()
    await late
    await unreserved


NUM_GROUPS = 5


class SlowJudge:
    """Returns no reward until the test allows it."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        self.asked += 1
        await self.may_answer.wait()
        return [Reward(value=1.0)] * len(samples)

    async def close(self) -> None:
        pass


async def test_engine_generates_while_rewards_are_computed() -> None:
    """With slots for only one group, all groups are generated before the first reward arrives."""
    bus, judge = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), SlowJudge()
    await publish_prompts(bus, *range(NUM_GROUPS))
    worker, follower = fakes.worker(bus, fakes.Engine(), reward=judge, max_running=2)
    running = asyncio.create_task(fakes.run_worker((worker, follower)))
    await fakes.until(lambda: judge.asked == NUM_GROUPS)
    assert await bus.last_sequence(TRAJECTORIES) == 0, "no group has its reward"
    judge.may_answer.set()
    worker.drain()
    await running
    assert await bus.last_sequence(TRAJECTORIES) == NUM_GROUPS


async def test_ends_function_that_never_returns() -> None:
    own = OwnTime(0.01)
    with pytest.raises(TimeoutError):
        async with own.limit():
            await asyncio.Event().wait()
    assert own.is_over


async def test_waits_for_the_engine_do_not_count() -> None:
    own, loop = OwnTime(3600.0), asyncio.get_running_loop()
    async with own.limit():
        assert own._timeout is not None
        with own.pause():
            assert own._timeout.when() is None
            with own.pause():
                pass
            assert own._timeout.when() is None
        assert 0 < (own._timeout.when() or math.inf) - loop.time() <= 3600.0


async def test_timeout_inside_the_function_is_not_ours() -> None:
    own = OwnTime(3600.0)
    with pytest.raises(TimeoutError):
        async with own.limit():
            raise TimeoutError
    assert not own.is_over


async def test_call_left_running_by_its_function_ends_normally() -> None:
    own, left = OwnTime(3600.0), asyncio.Event()

    async def call() -> str:
        with own.pause():
            await left.wait()
        return "answered"

    async with own.limit():
        behind = asyncio.create_task(call())
        await asyncio.sleep(0)
    left.set()
    assert await behind == "answered"
    assert await call() == "answered"
