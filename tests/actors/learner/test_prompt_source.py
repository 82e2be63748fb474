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
from asyncrl.bus.memory.stores import Objects
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import BusError, ConfigError, HopelessError
from asyncrl.images.store import PREFIX, ImageStore
from asyncrl.messages import Heartbeat, Progress, PromptGroup, SamplingParams, Wait
from asyncrl.messages.images import ImageRef
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


class Shown(Rows):
    """Every prompt shows a picture of its own."""

    def __init__(self, images: ImageStore) -> None:
        super().__init__(count=100)
        self.images = images

    def digest(self, position: int) -> str:
        return self.images.add(f"picture {position}".encode())

    def at(self, position: int) -> PromptRow | None:
        row = super().at(position)
        assert row is not None
        ref = ImageRef(digest=self.digest(position), grid=(1, 2, 2), start=1, num_tokens=1)
        return dataclasses.replace(row, images=(ref,))


class FullOnce(Objects):
    """Has no room for a removal, once: a full disk."""

    refuses = True

    def remove(self, name: str) -> None:
        if self.refuses:
            self.refuses = False
            raise BusError("no space left")
        super().remove(name)


async def test_pictures_stay_on_the_bus_while_a_prompt_shows_them_also_one_of_an_earlier_learner() -> None:
    bus, objects = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), FullOnce()
    table, before = GroupTable(), ImageStore(objects=objects)
    before.publish([before.add(b"picture 7"), before.add(b"left behind")])
    table.publish(0, position=7, oldest_start=0)
    sampling = SamplingParams(max_new_tokens=4)
    prompt = PromptGroup(group_id=0, prompt_tokens=np.array([1], np.int32), group_size=2, sampling=sampling)
    await bus.publish(PROMPTS, prompt, key="0")
    rows = Shown(ImageStore(objects=objects))
    source = PromptSource(
        "prompts",
        bus,
        rows=rows,
        admission=Admission(mode="async", groups_per_batch=1, max_staleness=0, total_groups=100),
        sampling=sampling,
        group_size=2,
        table=table,
        images=rows.images,
        are_sampled=False,
    )
    await source._reconcile()
    await source._fill(Progress(incarnation=table.incarnation, step=1, policy_version=0, batches_taken=1))
    on_bus = objects.names()
    await source._withdraw_images()
    assert objects.names() == on_bus >= {PREFIX + rows.digest(7)}
    table.fail(0, error="answered, one way or the other")
    await source._withdraw_images()  # nothing can be removed
    await source._withdraw_images()
    assert objects.names() == {PREFIX + digest for shown in source._shown.values() for digest in shown} != set()


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
