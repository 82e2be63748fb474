"""Unanswered prompts are issued again unchanged, and withdrawn once they are answered."""

from __future__ import annotations

from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages import Heartbeat, SamplingParams, Wait
from asyncrl.messages.roles import PROMPT_SOURCE, WORKER
from asyncrl.messages.topics import ACTORS, PROMPTS
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.admission import Admission
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.rows import Rows


async def test_a_prompt_that_nobody_answers_is_issued_again_and_withdrawn_once_it_is_answered() -> None:
    bus, table = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), GroupTable()
    source = PromptSource(
        "prompts",
        bus,
        rows=Rows(count=100),
        admission=Admission(mode="async", groups_per_batch=4, max_staleness=1, total_groups=100),
        sampling=SamplingParams(max_new_tokens=4),
        group_size=2,
        table=table,
        reissue_seconds=60.0,
    )
    start = source._overdue._looked
    table.publish(0, position=10, oldest_start=3)
    wait = Wait(what="prompts", on=PROMPT_SOURCE, seconds=50)
    await bus.put(ACTORS, Heartbeat(actor="w0", role=WORKER, phase="running", waits=(wait,)), key="w0")
    for seconds in range(2, 62, 2):
        await source.reissue_overdue(now=start + seconds)
        assert await bus.keys(PROMPTS) == set()  # a client took it
    await source.reissue_overdue(now=start + 62)
    async with bus.consume(PROMPTS) as deliveries:
        issued = (await anext(deliveries)).message
    assert issued is not None
    assert (issued.group_id, issued.prompt, issued.min_policy_version) == (0, "p10", 3)
    assert source.numbers() == {"prompts/reissued": 1}
    assert await bus.keys(PROMPTS) == {"0"}
    table.fail(0, error="answered, one way or the other")
    await source.reissue_overdue(now=start + 64)
    assert await bus.keys(PROMPTS) == set()
