"""The contract of every Bus for states and for errors, over every adapter."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.bus.port import Bus
from asyncrl.errors import MessageTooLarge
from asyncrl.messages import Event, Heartbeat, Progress, WeightVersion
from asyncrl.messages.topics import ACTORS, EVENTS, PROGRESS, PROMPTS, WEIGHTS, Topic
from tests.harness.buses import (
    first,
    heartbeat,
    progress,
    publish_groups,
    publish_prompts,
    taken,
)

pytestmark = pytest.mark.usefixtures("no_blocking")


# -- states ------------------------------------------------------------------------------------------------------------


async def test_state_put_without_a_reply_is_read_by_a_later_request(bus: Bus) -> None:
    await bus.put(ACTORS, heartbeat("w0"), key="w0", is_sure=False)
    await bus.put(ACTORS, heartbeat("w1"), key="w1")
    assert (await bus.states(ACTORS)).keys() == {"w0", "w1"}


async def test_watch_yields_the_current_state_first(bus: Bus) -> None:
    await bus.put(PROGRESS, progress(1))
    await bus.put(PROGRESS, progress(2))
    async with bus.watch(PROGRESS) as states:
        assert (await anext(states)).step == 2
        await bus.put(PROGRESS, progress(3))
        assert (await anext(states)).step == 3


async def test_watch_waits_for_the_first_state(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    async with bus.watch(WEIGHTS) as versions:
        waiting = asyncio.create_task(anext(versions))
        await other.put(WEIGHTS, WeightVersion(incarnation=0, policy_version=4, uri="/w/4", sha256="ab", num_bytes=9))
        assert (await waiting).policy_version == 4


async def test_slow_watcher_gets_the_newest_state(bus: Bus) -> None:
    async with bus.watch(PROGRESS) as states:
        for step in range(1, 50):
            await bus.put(PROGRESS, progress(step))
        steps = [(await anext(states)).step]
        while steps[-1] < 49:
            steps.append((await anext(states)).step)
    assert steps == sorted(set(steps))


async def test_watch_follows_one_key(bus: Bus) -> None:
    await bus.put(ACTORS, heartbeat("b"), key="b")
    async with bus.watch(ACTORS, key="a") as states:
        await bus.put(ACTORS, heartbeat("b"), key="b")
        await bus.put(ACTORS, heartbeat("a"), key="a")
        assert (await anext(states)).actor == "a"


async def test_states_are_the_last_of_each_key(bus: Bus) -> None:
    assert await bus.states(ACTORS) == {}
    for pid, name in enumerate(("a", "b", "a")):
        await bus.put(ACTORS, replace(heartbeat(name), pid=pid), key=name)
    assert {key: state.pid for key, state in (await bus.states(ACTORS)).items()} == {"a": 2, "b": 1}
    await bus.put(PROGRESS, progress(3))
    assert (await bus.states(PROGRESS))[""].step == 3


async def test_states_under_a_prefix_are_read_and_forgotten_together(bus: Bus) -> None:
    keys = {"1/a", "1/b/c", "1/b/d.e", "11/a", "1"}
    for key in keys:
        await bus.put(ACTORS, heartbeat(key.partition("/")[0]), key=key)
    assert set(await bus.states(ACTORS)) == keys
    assert set(await bus.states(ACTORS, under="1/")) == {"1/a", "1/b/c", "1/b/d.e"}
    assert set(await bus.states(ACTORS, under="1/b/")) == {"1/b/c", "1/b/d.e"}
    assert await bus.states(ACTORS, under="2/") == {}
    await bus.forget(ACTORS, key="1/b/")
    await bus.forget(ACTORS, key="2/")
    assert set(await bus.states(ACTORS)) == {"1/a", "11/a", "1"}
    await bus.put(ACTORS, replace(heartbeat("1"), pid=7), key="1/b/c")
    assert (await bus.states(ACTORS, under="1/b/"))["1/b/c"].pid == 7


async def test_forgotten_state_is_gone_and_can_be_set_again(bus: Bus) -> None:
    for name in ("a", "b"):
        await bus.put(ACTORS, heartbeat(name), key=name)
    await bus.forget(ACTORS, key="a")
    await bus.forget(ACTORS, key="never there")
    assert set(await bus.states(ACTORS)) == {"b"}
    async with bus.watch(ACTORS, key="a") as states:
        await bus.put(ACTORS, replace(heartbeat("a"), pid=7), key="a")
        assert (await anext(states)).pid == 7


async def test_state_expires(bus: Bus) -> None:
    brief = Topic("brief", "state", Heartbeat, seconds_to_live=2.0)
    await bus.put(brief, heartbeat("a"), key="a")
    assert set(await bus.states(brief)) == {"a"}
    for tick in range(1, 100):  # "b" keeps sending heartbeats and outlives "a"
        await bus.put(brief, heartbeat(f"b{tick}"), key="b")
        present = await bus.states(brief)
        assert "b" in present
        if "a" not in present:
            break
        async with bus.watch(brief, key="b") as states:
            await anext(states)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(states)
    assert "a" not in await bus.states(brief)


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_undecodable_bytes_are_delivered_as_a_problem(bus: Bus) -> None:
    await bus.publish(Topic("prompts", "work", Progress), progress(1), key="bad")
    await publish_prompts(bus, 1)
    async with taken(bus, 2) as (bad, good):
        assert (bad.key, bad.message) == ("bad", None)
        assert "PromptGroup" in bad.problem
        assert (good.key, good.problem) == ("1", "")
        await bad.ack()


async def test_an_undecodable_log_entry_is_a_problem_of_its_own(bus: Bus) -> None:
    await bus.publish(Topic("trajectories", "log", Progress), progress(1), key="bad")
    await publish_groups(bus, 1)
    bad, good = await first(bus, 2)
    assert (bad.sequence, bad.key, bad.message) == (1, "bad", None)
    assert "TrajectoryGroup" in bad.problem
    assert good.message.group_id == 1


async def test_an_undecodable_state_is_skipped(bus: Bus) -> None:
    await bus.put(Topic("progress", "state", Heartbeat), heartbeat("x"))
    assert await bus.states(PROGRESS) == {}
    async with bus.watch(PROGRESS) as states:
        await bus.put(PROGRESS, progress(2))
        assert (await anext(states)).step == 2


async def test_too_large_message_is_refused_with_the_remedy(bus: Bus) -> None:
    event = Event(kind="x", actor="a", time=0.0, data={"text": "y" * bus.max_message_bytes})
    with pytest.raises(MessageTooLarge, match=r"events 1: .* bytes.*max_message_bytes.*group_size"):
        await bus.publish(EVENTS, event, key="1")
    assert await bus.depth(EVENTS) == 0


async def test_a_message_as_large_as_allowed_goes_through(bus: Bus) -> None:
    event = Event(kind="x", actor="a", time=0.0, data={"text": "y" * (bus.max_message_bytes - 100)})
    await bus.publish(EVENTS, event, key="k" * 200)
    (record,) = await first(bus, 1, topic=EVENTS)
    assert bus.max_message_bytes - 100 < record.num_bytes <= bus.max_message_bytes


async def test_a_cancellation_is_never_lost(bus: Bus) -> None:
    """Python 3.11's wait_for swallows a cancellation that arrives together with the reply."""

    async def busy() -> None:
        while True:
            await bus.depth(PROMPTS)
            await bus.put(PROGRESS, progress(1))

    for ticks in range(150):
        task = asyncio.create_task(busy())
        for _ in range(ticks % 50):  # a different moment of the exchange each time
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done, f"lost after {ticks} ticks"
        assert task.cancelled()


async def test_cancelled_actor_can_still_publish(bus: Bus) -> None:
    await bus.put(ACTORS, heartbeat("a"), key="a")

    async def actor() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await bus.forget(ACTORS, key="a")

    task = asyncio.create_task(actor())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await bus.states(ACTORS) == {}
