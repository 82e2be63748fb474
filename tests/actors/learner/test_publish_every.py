"""weights.every_steps: versions that no worker needs are not published."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import WeightsSection
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import WEIGHTS
from tests.harness.fakes import Engine, Loop, run_worker, worker


async def test_only_each_third_version_and_the_last_are_published(bus_factory: Any, tmp_path: Path) -> None:
    loop, engine = Loop(await bus_factory(), tmp_path, steps=8, max_staleness=2, publish_every=3), Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), engine)))
        await loop.run_learner()
    assert loop.backend.steps == 8
    assert set(engine.loads) <= {3, 6, 8}
    assert (await loop.bus.states(WEIGHTS))[""].policy_version == 8
    assert loop.recorder.rows[-1]["weights/version"] == 8


def test_there_is_no_version_between_two_steps() -> None:
    with pytest.raises(ConfigError, match="every_steps must be"):
        WeightsSection(every_steps=0)
