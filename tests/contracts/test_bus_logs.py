"""The contract of every bus for logs: kept, read from a cursor, trimmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.bus.port import Bus, LogMark
from asyncrl.messages import Event
from asyncrl.messages.topics import EVENTS, PROMPTS, TRAJECTORIES
from tests.harness.buses import (
    first,
    group,
    prompt,
    publish_groups,
    publish_prompts,
    taken,
)

pytestmark = pytest.mark.usefixtures("no_blocking")


async def test_a_log_is_read_from_its_start_then_followed(bus_factory: Any) -> None:
    bus, writer = await bus_factory(), await bus_factory()
    await publish_groups(writer, 1, 2)
    async with bus.read(TRAJECTORIES) as records:
        assert [(await anext(records)).sequence for _ in range(2)] == [1, 2]
        waiting = asyncio.create_task(anext(records))
        await publish_groups(writer, 3)
        record = await waiting
        assert (record.sequence, record.message.group_id) == (3, 3)


async def test_a_log_is_read_from_a_cursor(bus: Bus) -> None:
    await publish_groups(bus, 1, 2, 3)
    assert [record.sequence for record in await first(bus, 1, after=2)] == [3]


async def test_log_without_entries_begins_at_sequence_one(bus: Bus) -> None:
    """Progress in a log is counted from its first entry."""
    assert (await bus.log_state(TRAJECTORIES, mark=LogMark())).first == 1
    await publish_groups(bus, 1)
    assert (await bus.log_state(TRAJECTORIES, mark=LogMark())).first == 1
    await bus.trim(TRAJECTORIES, through=1)
    assert (await bus.log_state(TRAJECTORIES, mark=LogMark())).first == 2
    await bus.check()


async def test_cursor_at_the_end_waits_for_the_next_entry(bus: Bus) -> None:
    await publish_groups(bus, 1, 2)
    async with bus.read(TRAJECTORIES, after=2) as records:
        await publish_groups(bus, 3)
        assert (await anext(records)).sequence == 3


async def test_every_reader_sees_everything(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    await publish_groups(bus, *range(5))
    for reader in (bus, other):
        assert [record.key for record in await first(reader, 5)] == ["0", "1", "2", "3", "4"]


async def test_record_has_its_size(bus: Bus) -> None:
    await bus.publish(TRAJECTORIES, group(1, tokens=10_000), key="1")
    (record,) = await first(bus, 1)
    assert 90_000 < record.num_bytes < 91_000  # 4 + 4 + 1 bytes per token


async def test_a_trimmed_log_starts_later(bus: Bus) -> None:
    await publish_groups(bus, 1, 2, 3)
    await bus.trim(TRAJECTORIES, through=2)
    assert await bus.depth(TRAJECTORIES) == 1
    assert await bus.keys(TRAJECTORIES) == {"3"}
    assert [record.sequence for record in await first(bus, 1)] == [3]


@pytest.mark.parametrize("through", [-1, 0, 99])
async def test_trimming_moves_no_sequence(bus: Bus, through: int) -> None:
    await publish_groups(bus, 1, 2)
    await bus.trim(TRAJECTORIES, through=through)
    assert await bus.last_sequence(TRAJECTORIES) == 2
    assert await bus.depth(TRAJECTORIES) == (0 if through == 99 else 2)
    await publish_groups(bus, 3)
    assert [record.sequence for record in await first(bus, 1, after=2)] == [3]


async def test_trimming_what_a_reader_has_not_reached_skips_it(bus: Bus) -> None:
    await publish_groups(bus, 1)
    async with bus.read(TRAJECTORIES, after=1) as records:
        await publish_groups(bus, 2)
        assert (await anext(records)).sequence == 2
        await bus.trim(TRAJECTORIES, through=2)
        await publish_groups(bus, 3)
        assert (await anext(records)).sequence == 3


async def test_keys_are_those_stored(bus: Bus) -> None:
    assert await bus.keys(PROMPTS) == set()
    await publish_prompts(bus, 1, 2)
    await publish_groups(bus, 7)
    assert await bus.keys(PROMPTS) == {"1", "2"}
    assert await bus.keys(TRAJECTORIES) == {"7"}
    async with taken(bus, 1) as (delivery,):
        assert await bus.keys(PROMPTS) == {"1", "2"}  # delivered but not acked counts as stored
        await delivery.ack()
    assert await bus.keys(PROMPTS) == {"2"}


async def test_last_sequence_survives_ack_and_trim(bus: Bus) -> None:
    assert await bus.last_sequence(PROMPTS) == await bus.last_sequence(TRAJECTORIES) == 0
    await publish_prompts(bus, 1, 2)
    await publish_groups(bus, 1, 2, 3)
    async with taken(bus, 2) as deliveries:
        for delivery in deliveries:
            await delivery.ack()
    await bus.trim(TRAJECTORIES, through=3)
    assert await bus.last_sequence(PROMPTS) == 2
    assert await bus.last_sequence(TRAJECTORIES) == 3


async def test_events_are_a_log(bus: Bus) -> None:
    await bus.publish(EVENTS, Event(kind="dropped", actor="learner", time=1.0, data={"tokens": 7}), key="e1")
    (record,) = await first(bus, 1, topic=EVENTS)
    assert record.message.data == {"tokens": 7}


async def test_log_state_tells_whether_it_is_the_marked_log(bus: Bus) -> None:
    await publish_groups(bus, 1, 2)
    last = (await first(bus, 2))[-1]
    here = await bus.log_state(TRAJECTORIES, mark=LogMark())
    mark = LogMark(log=here.identity, sequence=2, stored=last.stored)
    assert (await bus.log_state(TRAJECTORIES, mark=mark)).problem == ""
    await bus.trim(TRAJECTORIES, through=2)
    found = await bus.log_state(TRAJECTORIES, mark=mark)
    assert (found.problem, found.first) == ("", 3)
    other = LogMark(log="of another run", sequence=1)
    assert (await bus.log_state(TRAJECTORIES, mark=other)).problem
    # the mark of a checkpoint that knows no log
    assert (await bus.log_state(TRAJECTORIES, mark=LogMark(sequence=3))).problem


async def test_lost_message_can_be_published_again(bus: Bus) -> None:
    await publish_prompts(bus, 1)
    async with taken(bus, 1) as (delivery,):
        await delivery.ack()
    assert await bus.publish(PROMPTS, prompt(1), key="1") is False
    assert await bus.publish(PROMPTS, prompt(1), key="1", again=True) is True
    assert await bus.publish(PROMPTS, prompt(1), key="1", again=True) is False  # the message is still stored


async def test_trimmed_key_of_a_log_can_be_published_again(bus: Bus) -> None:
    await publish_groups(bus, 1)
    await bus.trim(TRAJECTORIES, through=1)
    assert await bus.publish(TRAJECTORIES, group(1), key="1") is True
