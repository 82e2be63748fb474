"""Sample slots: which groups wait for slots, and which group holds all of them."""

from __future__ import annotations

import asyncio

from asyncrl.actors.rollout.slots import SampleSlots


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
