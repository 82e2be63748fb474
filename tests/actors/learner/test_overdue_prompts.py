"""Unanswered prompts go to the prompt source again unchanged, and are withdrawn once they are answered."""

from __future__ import annotations

from asyncrl.actors.learner.overdue_prompts import OverduePrompts
from asyncrl.actors.learner.prompt_link import OverduePrompt, PromptLink
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import PROMPT_SOURCE, WORKER
from asyncrl.messages.topics import ACTORS, PROMPTS
from asyncrl.policies.groups.table import GroupTable
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.buses import prompt


async def test_what_every_worker_waits_beside_is_issued_again_and_withdrawn_once_it_is_answered() -> None:
    now = 0.0
    bus, link = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), PromptLink()
    table = GroupTable()
    overdue = OverduePrompts(bus, table=table, link=link, seconds=60.0, clock=lambda: now)
    table.publish(0, position=10, oldest_start=3)
    wait = Wait(what="prompts", on=PROMPT_SOURCE, seconds=50)
    await bus.put(ACTORS, Heartbeat(actor="w0", role=WORKER, phase="running", waits=(wait,)), key="w0")
    while link.overdue.empty():
        now += 2.0
        await overdue.look()
    assert now == 62.0
    assert link.overdue.get_nowait() == [OverduePrompt(group_id=0, position=10, oldest_start=3)]
    assert overdue.numbers() == {
        "learner/reissued_prompts": 1,
        "learner/reissues_left": 2,
        "learner/kept_prompts": 1,  # not on the bus: a client took it
    }
    table.fail(0, error="answered, one way or the other")
    for _ in range(2):  # the prompt source may have been about to publish it
        await bus.publish(PROMPTS, prompt(0), key="0", again=True)
        await overdue.look()
        assert await bus.keys(PROMPTS) == set()
    await bus.publish(PROMPTS, prompt(0), key="0", again=True)
    await overdue.look()
    assert await bus.keys(PROMPTS) == {"0"}
