"""Prompts: data that became too long, and prompts that nobody answers."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from asyncrl.actors.learner import prompt_source
from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import ConfigError, HopelessError
from asyncrl.messages import Heartbeat, SamplingParams, Wait
from asyncrl.messages.roles import PROMPT_SOURCE, WORKER
from asyncrl.messages.topics import ACTORS, PROMPTS
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.admission import Admission
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import Engine, Loop, run_all, worker
from tests.harness.rows import Rows


async def test_resume_ends_with_the_remedy_if_a_prompt_is_too_long_by_now() -> None:
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
        table=saved_table.restore(state),
    )
    with pytest.raises(HopelessError, match="row 2 of group 3 is longer than prompts may be now; resume with"):
        await asyncio.wait_for(source.run(), 60)


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


class Away(Rows):
    """A source whose server is away from row 6 on, for some requests."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 20

    def at(self, position: int) -> PromptRow | None:
        if position > 5 and self.failures:
            self.failures -= 1
            raise ConfigError("data.source: 'mine:Rows' at(6) raised ConnectionError") from ConnectionResetError()
        return super().at(position)


async def test_rows_of_a_server_that_is_away_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_source, "AWAY_SECONDS", 0.001)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop = Loop(bus, tmp_path, steps=8, rows=Away())
    await run_all(loop, worker(bus, Engine()))
    assert loop.backend.steps == 8
    assert loop.rows.failures == 0  # type: ignore[attr-defined]
