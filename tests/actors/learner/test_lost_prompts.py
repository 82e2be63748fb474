"""Prompts that the bus has lost are found, and those that only moved are not."""

from __future__ import annotations

import asyncio

from asyncrl.actors.learner.lost_prompts import LostPrompts
from asyncrl.actors.learner.prompt_link import PromptLink
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.adaptive import AdaptiveBound
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.buses import publish_groups, publish_prompts


async def test_a_group_that_is_nowhere_is_lost_and_one_that_waits_in_the_log_is_not() -> None:
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable(bound=AdaptiveBound.fixed(2))
    for group_id in range(4):
        table.publish(group_id, position=10 + group_id)
    await publish_prompts(bus, 0)
    await publish_groups(bus, 1)  # and its prompt was acked
    lost = LostPrompts(bus, table=table, link=link)
    await lost.look()
    assert link.lost.empty()  # it may be on its way there
    await publish_prompts(bus, 2)  # as this one was
    await lost.look()
    assert link.lost.get_nowait() == {3: 13}
    await publish_prompts(bus, 3)
    await lost.look()
    await lost.look()
    assert link.lost.empty()


async def test_prompts_that_came_back_with_an_older_log_do_not_hide_one_that_did_not() -> None:
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable(bound=AdaptiveBound.fixed(2))
    lost = LostPrompts(bus, table=table, link=link)
    for group_id in range(3):
        table.publish(group_id, position=group_id)
        if group_id < 2:
            table.fail(group_id, error="")
    await publish_prompts(bus, 0, 1)  # done long ago
    table.start_new_log()
    await lost.look()
    await asyncio.sleep(0)
    await lost.look()
    assert link.lost.get_nowait() == {2: 2}
