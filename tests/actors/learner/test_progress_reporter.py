"""The learner's progress stays on the bus, because admission of prompts depends on it."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.actors.learner import progress_reporter
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.bus.kept_states import KeptStates
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages.signing import UNSIGNED
from asyncrl.messages.topics import PROGRESS
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.adaptive import AdaptiveBound
from asyncrl.state.history import History
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES


async def test_progress_that_the_bus_lost_is_reported_again_and_a_newer_learners_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_reporter, "LOOK_SECONDS", 0.01)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    other = copy.copy(bus)  # another process on the same bus
    other._kept = KeptStates(UNSIGNED)
    table = GroupTable(bound=AdaptiveBound.fixed(1))
    reporter = ProgressReporter(bus, name="learner", table=table, history=History(tmp_path / "h.jsonl", incarnation=0))
    await reporter.progress()
    reported = (await bus.states(PROGRESS))[""]
    keeping = asyncio.create_task(reporter.keep_progress())
    try:
        async with bus.watch(PROGRESS) as states:
            assert await anext(states) == reported
            await other.forget(PROGRESS, key="")
            assert await anext(states) == reported
        newer = replace(reported, incarnation=1)
        await other.put(PROGRESS, newer)
        await asyncio.sleep(0.1)  # several looks
        assert (await bus.states(PROGRESS))[""] == newer
    finally:
        keeping.cancel()
        reporter.close()
