"""A full batch waits for older groups that would become too stale: which groups, how long, and what is reported."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.actors.learner import batcher, stragglers
from tests.harness.desk import Desk
from tests.harness.fakes import until


async def test_a_batch_prepared_ahead_still_waits_for_stragglers() -> None:
    desk = Desk(wait_for_stragglers=True, version=2)
    desk.start(of={0: 0, 1: 2, 2: 2})  # group 0 exceeds the bound after the step from version 2
    desk.arrive(1, 2, version=2)
    await desk.prepare([*desk.table.buffered.values()])
    taking = asyncio.create_task(desk.take())
    await until(lambda: not desk.changed.is_set())
    assert not taking.done()
    desk.arrive(0)
    assert await taking == [0, 1]


async def test_a_learner_that_waits_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (batcher, stragglers):
        monkeypatch.setattr(module, "LONG_WAIT_SECONDS", 0.01)
    desk = Desk(wait_for_stragglers=True, version=2)
    desk.start(of={0: 0, 1: 2, 2: 2})
    desk.arrive(1, 2, version=2)
    taking = asyncio.create_task(desk.take())
    await until(lambda: "step 3 has its 2 groups but waits for older groups" in caplog.text)
    assert "rollout workers up" not in caplog.text
    desk.arrive(0)
    assert await taking == [0, 1]


async def test_a_step_waits_for_stragglers_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Later steps do not wait for the same groups again."""
    desk = Desk(wait_for_stragglers=True, version=2, wait_seconds=0.01)
    desk.start(of={0: 0, 1: 2, 2: 2, 3: 2, 4: 2})
    desk.arrive(1, 2, 3, 4, version=2)
    assert await desk.take() == [1, 2]
    assert desk.batcher.straggler_wait_seconds >= 0.01
    assert "step 3 trains without older groups (1) after waiting 0.01 s for them" in caplog.text
    desk.table.trained(max_staleness=0)
    assert await desk.take() == [3, 4]
    assert desk.batcher.straggler_wait_seconds == 0.0


async def test_stragglers_of_several_batches_are_waited_for_once_all_together() -> None:
    """Three groups from version 0, two per batch: the third would be too late for the step after the next."""
    desk = Desk(wait_for_stragglers=True, version=1, wait_seconds=0.01)
    desk.start(of={0: 0, 1: 0, 2: 0, **dict.fromkeys(range(3, 9), 1)})
    desk.arrive(*range(3, 9), version=1)
    waited = []
    for _ in range(2):
        assert await desk.take() is not None
        waited.append(desk.batcher.straggler_wait_seconds > 0)
        desk.table.trained(max_staleness=0)
    assert waited == [True, False]


async def test_a_group_that_was_begun_late_is_not_waited_for_until_it_is_old() -> None:
    """Its prompt has been on the bus since version 0, but the version of its tokens is the one at which it began."""
    desk = Desk(wait_for_stragglers=True, version=2, begun={0: 1})
    desk.start(of={0: 0, 1: 2, 2: 2, 3: 2, 4: 2})
    desk.arrive(1, 2, 3, 4, version=2)
    assert await desk.take() == [1, 2]
    assert desk.batcher.straggler_wait_seconds == 0.0
    desk.table.trained(max_staleness=0)
    taking = asyncio.create_task(desk.take())
    await until(lambda: not desk.changed.is_set())
    assert not taking.done()
    desk.arrive(0, version=1)
    assert await taking == [0, 3]


async def test_a_wait_ends_when_it_is_heard_that_nobody_had_begun_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "LOOK_SECONDS", 0.01)
    desk = Desk(wait_for_stragglers=True, version=2, begun={0: 0})
    desk.start(of={0: 0, 1: 2, 2: 2})
    desk.arrive(1, 2, version=2)
    taking = asyncio.create_task(desk.take())
    await asyncio.sleep(0.05)
    assert not taking.done()
    desk.begun[0] = 2  # its worker died, and another worker restarted the group
    assert await taking == [1, 2]
