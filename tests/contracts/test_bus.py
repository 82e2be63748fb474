"""The contract of every Bus for work topics. Logs, states, services and leases: test_bus_*.py."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull
from asyncrl.messages.topics import ACTORS, PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness.buses import (
    SHORT,
    first,
    group,
    group_ids,
    heartbeat,
    progress,
    prompt,
    publish_groups,
    publish_prompts,
    taken,
    until_waiting,
)

pytestmark = pytest.mark.usefixtures("no_blocking")


# -- work --------------------------------------------------------------------------------------------------------------


async def test_arrays_survive(bus: Bus) -> None:
    await bus.publish(TRAJECTORIES, group(1), key="1")
    (record,) = await first(bus, 1)
    sent, got = group(1).trajectories[0], record.message.trajectories[0]
    for name in ("tokens", "response_mask", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
        assert getattr(got, name).dtype == getattr(sent, name).dtype
    assert got.version_spans == sent.version_spans
    assert (record.key, record.problem) == ("1", "")


async def test_a_key_is_published_once(bus: Bus) -> None:
    assert await bus.publish(PROMPTS, prompt(1), key="1") is True
    assert await bus.publish(PROMPTS, prompt(1), key="1") is False
    assert await bus.depth(PROMPTS) == 1


async def test_an_acked_key_is_remembered_for_a_while(bus: Bus) -> None:
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as (delivery,):
        await delivery.ack()
    assert await bus.publish(PROMPTS, prompt(1), key="1") is False


async def test_a_key_is_stored_once_in_a_log(bus: Bus) -> None:
    assert await bus.publish(TRAJECTORIES, group(1), key="1") is True
    assert await bus.publish(TRAJECTORIES, group(1), key="1") is False
    assert await bus.last_sequence(TRAJECTORIES) == 1


@pytest.mark.parametrize("key", ["a.b", "with space", "a/b*c>", "ünï", "=41", "A", "", "-_"])
async def test_any_text_is_a_key(bus: Bus, key: str) -> None:
    await bus.publish(PROMPTS, prompt(1), key=key)
    await bus.put(ACTORS, heartbeat(key.partition("/")[0]), key=key)
    assert await bus.keys(PROMPTS) == {key}
    assert set(await bus.states(ACTORS)) == {key}
    async with taken(bus, 1) as (delivery,):
        assert delivery.key == key


async def test_full_topic_refuses_until_a_message_is_acked(bus: Bus) -> None:
    await publish_prompts(bus, *range(8))
    with pytest.raises(BusFull, match="prompts"):
        await bus.publish(PROMPTS, prompt(8), key="8")
    assert await bus.publish(PROMPTS, prompt(1), key="1") is False  # a known key is still a duplicate
    async with taken(bus, 1) as (delivery,):
        await delivery.ack()
    assert await bus.publish(PROMPTS, prompt(8), key="8") is True


async def test_full_log_refuses_until_it_is_trimmed(bus_factory: Any) -> None:
    bus = await bus_factory(max_log_bytes=100_000)
    large = [group(number, tokens=4_000) for number in range(4)]  # 36 kB each: two fit, three do not
    await bus.publish(TRAJECTORIES, large[0], key="0")
    await bus.publish(TRAJECTORIES, large[1], key="1")
    with pytest.raises(BusFull, match="trajectories"):
        await bus.publish(TRAJECTORIES, large[2], key="2")
    await bus.trim(TRAJECTORIES, through=1)
    assert await bus.publish(TRAJECTORIES, large[2], key="2") is True


async def test_work_is_delivered_in_the_order_it_was_published(bus: Bus) -> None:
    await publish_prompts(bus, 3, 1, 2)
    async with taken(bus, 3) as deliveries:
        assert [delivery.key for delivery in deliveries] == ["3", "1", "2"]


async def test_retried_message_is_redelivered_as_the_next_attempt(bus: Bus) -> None:
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        assert delivery.attempt == 1
        await delivery.retry()
        again = await anext(deliveries)
        assert (again.key, again.attempt) == ("1", 2)
        await again.retry(delay=0.1)
        third = await anext(deliveries)
        assert (third.key, third.attempt) == ("1", 3)
        await third.ack()
    assert await bus.depth(PROMPTS) == 0


async def test_delayed_retry_lets_other_messages_go_first(bus: Bus) -> None:
    await publish_prompts(bus, 1, 2)
    async with bus.consume(PROMPTS) as deliveries:
        await (await anext(deliveries)).retry(delay=60)
        assert (await anext(deliveries)).key == "2"


async def test_messages_of_a_consumer_that_leaves_are_redelivered_at_once(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, 1, 2)
    with pytest.raises(RuntimeError, match="died"):
        async with taken(bus, 2) as deliveries:
            await deliveries[0].ack()
            raise RuntimeError("died")
    async with taken(other, 1) as (delivery,):
        assert (delivery.key, delivery.attempt) == ("2", 2)


async def test_messages_of_a_cancelled_consumer_are_redelivered(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, 1)
    has_taken = asyncio.Event()

    async def worker() -> None:
        async with taken(bus, 1):
            has_taken.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(worker())
    await has_taken.wait()
    task.cancel()
    async with taken(other, 1) as (delivery,):
        assert delivery.attempt == 2
    assert task.cancelled()


async def test_messages_of_a_consumer_that_is_cancelled_twice_are_redelivered(bus_factory: Any) -> None:
    """As when its engine dies at the same moment as the supervisor stops its actors."""
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, 1)
    has_taken = asyncio.Event()

    async def worker() -> None:
        async with bus.consume(PROMPTS) as deliveries:
            await anext(deliveries)
            has_taken.set()
            await anext(deliveries)

    task = asyncio.create_task(worker())
    await has_taken.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    async with taken(other, 1) as (delivery,):
        assert delivery.attempt == 2
    assert task.cancelled()


async def test_cancelled_wait_takes_no_message(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    async with bus.consume(PROMPTS) as deliveries:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(deliveries)
        await publish_prompts(bus, 1)  # the consumer that gave up waiting may receive it
    async with taken(other, 1) as (delivery,):
        assert delivery.key == "1"


async def test_consumer_that_no_longer_waits_leaves_messages_to_others(bus_factory: Any) -> None:
    """Like a draining worker, which finishes its work and takes nothing new."""
    bus, other = await bus_factory(), await bus_factory()
    async with bus.consume(PROMPTS) as deliveries:
        waiting = asyncio.ensure_future(anext(deliveries))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(waiting)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await publish_prompts(bus, 1)
        async with taken(other, 1) as (delivery,):
            assert (delivery.key, delivery.attempt) == ("1", 1)
            await delivery.ack()


async def test_prefetch_is_in_order_and_no_more_than_wanted(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, *range(8))
    async with bus.consume(PROMPTS) as deliveries:
        for wanted, key in ((4, "0"), (3, "1"), (2, "2"), (1, "3")):
            deliveries.want(wanted)
            assert (await anext(deliveries)).key == key
        async with taken(other, 4) as theirs:
            assert {(delivery.key, delivery.attempt) for delivery in theirs} == {(key, 1) for key in "4567"}


async def test_prefetch_leaves_other_consumers_their_share(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    async with bus.consume(PROMPTS) as ours, other.consume(PROMPTS) as theirs:
        for deliveries in (ours, theirs):
            deliveries.want(4)
        waiting = [asyncio.ensure_future(anext(deliveries)) for deliveries in (ours, theirs)]
        for queue in (bus, other):
            await queue.depth(PROMPTS)  # by now both have asked
        await until_waiting(bus, 2)
        await publish_prompts(bus, 0, 1)
        assert {(await one).key for one in waiting} == {"0", "1"}


async def test_prefetched_messages_go_to_others_when_their_consumer_stops(bus_factory: Any) -> None:
    """Like a draining worker: it keeps what it has begun."""
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, 0, 1, 2)
    async with bus.consume(PROMPTS) as deliveries:
        deliveries.want(3)
        begun = await anext(deliveries)
        await deliveries.stop()
        async with taken(other, 2) as theirs:
            assert {delivery.key for delivery in theirs} == {"1", "2"}
            await begun.ack()
            assert await bus.depth(PROMPTS) == 2
        deliveries.want(1)
        assert (await anext(deliveries)).key in "12"


async def test_a_retry_is_not_undone_by_a_keep_in_the_same_moment(bus: Bus) -> None:
    await publish_prompts(bus, 1)
    async with bus.consume(PROMPTS) as deliveries:
        delivery = await anext(deliveries)
        async with asyncio.TaskGroup() as group:
            group.create_task(delivery.keep())
            group.create_task(delivery.retry(delay=0.1))
            group.create_task(delivery.keep())
        assert (await anext(deliveries)).attempt == 2


async def test_cancelled_wait_can_be_repeated(bus: Bus) -> None:
    async with bus.consume(PROMPTS) as deliveries, bus.read(TRAJECTORIES) as records, bus.watch(PROGRESS) as states:
        for waiting in (deliveries, records, states):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(waiting)
        await publish_prompts(bus, 1)
        await publish_groups(bus, 1)
        await bus.put(PROGRESS, progress(1))
        assert (await anext(deliveries)).key == "1"
        assert (await anext(records)).key == "1"
        assert (await anext(states)).step == 1


async def test_messages_of_a_silent_consumer_are_redelivered_after_ack_seconds(bus_factory: Any) -> None:
    bus, other = await bus_factory(ack_seconds=SHORT), await bus_factory(ack_seconds=SHORT)
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as (silent,), taken(other, 1) as (delivery,):
        assert (delivery.key, delivery.attempt, silent.attempt) == ("1", 2, 1)
        await delivery.ack()


async def test_late_retry_of_a_slow_consumer_does_not_disturb_the_next_one(bus_factory: Any) -> None:
    bus, other = await bus_factory(ack_seconds=SHORT), await bus_factory(ack_seconds=SHORT)
    await publish_prompts(bus, 1)
    async with other.consume(PROMPTS) as others:
        async with taken(bus, 1) as (slow,):
            delivery = await anext(others)
            assert delivery.attempt == 2
            await slow.retry()
        await delivery.ack()
    assert await bus.depth(PROMPTS) == 0


async def test_late_ack_of_a_slow_consumer_counts(bus_factory: Any) -> None:
    bus, other = await bus_factory(ack_seconds=SHORT), await bus_factory(ack_seconds=SHORT)
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as (slow,), taken(other, 1):
        await slow.ack()
        assert await bus.depth(PROMPTS) == 0


async def test_keep_postpones_redelivery(bus_factory: Any) -> None:
    bus, other = await bus_factory(ack_seconds=2.0), await bus_factory(ack_seconds=2.0)
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as (delivery,), other.consume(PROMPTS) as others:
        waiting = asyncio.ensure_future(anext(others))
        for _ in range(30):  # for one and a half ack_seconds
            await asyncio.sleep(0.1)
            await delivery.keep()
        assert not waiting.done()
        await delivery.ack()
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert await bus.depth(PROMPTS) == 0


async def test_two_consumers_share_the_work(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    await publish_prompts(bus, *range(8))
    async with taken(bus, 4) as ours, taken(other, 4) as theirs:
        assert group_ids(ours) | group_ids(theirs) == set(range(8))
        assert group_ids(ours).isdisjoint(group_ids(theirs))


async def test_ack_has_taken_effect_when_it_returns(bus_factory: Any) -> None:
    bus, observer = await bus_factory(), await bus_factory()
    await publish_prompts(bus, 1, 2, 3)
    async with taken(bus, 3) as deliveries:
        assert await observer.depth(PROMPTS) == 3
        for left, delivery in zip((2, 1, 0), deliveries, strict=True):
            await delivery.ack()
            assert await observer.depth(PROMPTS) == left


async def test_acked_message_is_not_redelivered(bus: Bus) -> None:
    await publish_prompts(bus, 1, 2)
    async with taken(bus, 2) as (one, two):
        await one.ack()
        await one.ack()  # a second ack has no effect
        await one.retry()  # nor does a late retry
        await two.retry()
    async with taken(bus, 1) as (delivery,):
        assert delivery.key == "2"
        assert await bus.keys(PROMPTS) == {"2"}


async def test_withdrawn_key_is_free_while_its_message_is_still_held(bus: Bus) -> None:
    """The old holder may renew, retry and ack its delivery; none of that affects the new message."""
    await publish_prompts(bus, 1, 2)
    async with taken(bus, 2) as held:
        for one in held:
            await bus.withdraw(PROMPTS, key=one.key)
        assert await bus.keys(PROMPTS) == set()
        assert await bus.publish(PROMPTS, prompt(1), key="1", again=True) is True
        first_held, second_held = held
        await first_held.keep()
        await first_held.ack()
        await second_held.retry()
        assert await bus.keys(PROMPTS) == {"1"}
        async with taken(bus, 1) as (again,):
            assert (again.key, again.attempt) == ("1", 1)
            await again.ack()
    assert await bus.keys(PROMPTS) == set()
    await bus.check()


async def test_withdrawing_an_absent_key_does_nothing(bus: Bus) -> None:
    await bus.withdraw(PROMPTS, key="1")
    assert await bus.depth(PROMPTS) == 0
