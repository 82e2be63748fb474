"""Prompts that the bus has lost are found; prompts that have only moved are not reported."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from asyncrl.actors.learner.lost_prompts import LostPrompts
from asyncrl.actors.learner.prompt_link import PromptLink
from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import HopelessError
from asyncrl.messages import PromptGroup, SamplingParams
from asyncrl.messages.topics import PROMPTS
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.adaptive import AdaptiveBound
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.trust.tickets import Tickets
from asyncrl.state import history
from asyncrl.state.history import HISTORY_FILE
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.buses import publish_groups, publish_prompts
from tests.harness.fakes import Engine, Loop, run_worker, worker


async def test_a_group_that_is_nowhere_is_lost_and_one_that_waits_in_the_log_is_not() -> None:
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable(bound=AdaptiveBound.fixed(2))
    for group_id in range(4):
        table.publish(group_id, position=10 + group_id)
    await publish_prompts(bus, 0)
    await publish_groups(bus, 1)  # and its prompt was acked
    lost = LostPrompts(bus, table=table, link=link, tickets=Tickets())
    await lost.look()
    assert link.lost.empty()  # the prompt may still be on its way to the bus
    await publish_prompts(bus, 2)  # as this prompt was
    await lost.look()
    assert link.lost.get_nowait() == {3: 13}
    await publish_prompts(bus, 3)
    await lost.look()
    await lost.look()
    assert link.lost.empty()


async def test_a_prompt_whose_worker_could_not_read_it_is_published_again_where_answers_need_a_ticket(
    bus: Bus, tmp_path: Path
) -> None:
    """Another prompt has replaced that of group 1. The worker that takes it fails group 1 without a ticket, so the
    failure does not count."""
    forged = PromptGroup(group_id=7, prompt_tokens=[5], group_size=2, sampling=SamplingParams(max_new_tokens=4))
    await bus.publish(PROMPTS, forged, key="1")
    loop = Loop(bus, tmp_path, tickets=Tickets(b"of this run"))
    helper = asyncio.create_task(run_worker(worker(bus, Engine())))
    await loop.run_learner()
    helper.cancel()
    await asyncio.wait((helper,))
    entries = history.read(tmp_path / HISTORY_FILE)
    fates = {group_id: entry.kind for entry in entries for group_id in entry.groups}
    assert set(fates.values()) == {"trained"} and 1 in fates


async def test_prompts_that_came_back_with_an_older_log_do_not_hide_one_that_did_not() -> None:
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable(bound=AdaptiveBound.fixed(2))
    lost = LostPrompts(bus, table=table, link=link, tickets=Tickets())
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


async def test_a_prompt_that_its_server_forgot_to_remove_hides_none_that_is_lost_later() -> None:
    """As after a full disk: the prompt was acknowledged but stays on the stream for good."""
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable(bound=AdaptiveBound.fixed(2))
    lost = LostPrompts(bus, table=table, link=link, tickets=Tickets())
    for group_id in range(2):
        table.publish(group_id, position=group_id)
    table.fail(0, error="")
    await publish_prompts(bus, 0, 1)
    await lost.look()
    table.publish(2, position=2)  # two prompts for two groups, but one prompt belongs to neither group
    await lost.look()
    await lost.look()
    assert link.lost.get_nowait() == {2: 2}


async def test_a_prompt_of_the_checkpoint_that_is_too_long_by_now_ends_the_run_with_the_remedy() -> None:
    """It was not when it was published: the limits of the run file, or what the engine takes, have changed."""

    class Rows:
        def at(self, position: int) -> PromptRow:
            return PromptRow(epoch=0, prompt="long", tokens=np.array([], np.int32))

    fresh = LearnerState.fresh()
    state = dataclasses.replace(
        fresh, incarnation=1, prompts=PromptState(next_group_id=4, position=4, outstanding={3: 2})
    )
    source = PromptSource(
        *("prompts", MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)),
        rows=Rows(),  # type: ignore[arg-type]
        admission=Admission(mode="async", groups_per_batch=4, max_staleness=1, total_groups=100),
        sampling=SamplingParams(max_new_tokens=4),
        group_size=2,
        state=state,
        link=PromptLink(),
    )
    with pytest.raises(HopelessError, match="row 2 of group 3 is longer than prompts may be now; resume with"):
        await asyncio.wait_for(source.run(), 60)
