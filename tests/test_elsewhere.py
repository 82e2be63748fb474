"""A run is resumed where its checkpoints are; from elsewhere that is said at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from asyncrl import config, elsewhere
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.protocols import Bus
from asyncrl.topics import PROGRESS, TRAJECTORIES
from tests.bus_fixtures import progress, publish_groups

REFUSED = r"run.directory: .* has no checkpoint of run 'demo', which is at step 3; resume it with the run.directory "


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return config.load(Path(__file__).parent.parent / "examples" / "demo.toml", [f"run.directory={tmp_path}"])


async def test_a_run_whose_log_begins_behind_a_checkpoint_is_not_begun_anew(bus: Bus, run: RunConfig) -> None:
    await bus.put(PROGRESS, progress(3))
    await publish_groups(bus, 0, 1, 2)
    await bus.trim(TRAJECTORIES, through=2)
    with pytest.raises(ConfigError, match=REFUSED) as refused:
        await elsewhere.refuse(run, bus=bus)
    assert "\n" not in str(refused.value)


async def test_a_run_that_is_finished_is_not_begun_anew(bus: Bus, run: RunConfig) -> None:
    """Also when its log was kept."""
    await bus.put(PROGRESS, dataclasses.replace(progress(3), finished=True))
    await publish_groups(bus, 0)
    with pytest.raises(ConfigError, match=REFUSED):
        await elsewhere.refuse(run, bus=bus)


async def test_a_run_that_was_killed_before_its_first_checkpoint_may_begin_anew(bus: Bus, run: RunConfig) -> None:
    await bus.put(PROGRESS, progress(3))
    await publish_groups(bus, 0, 1)
    await elsewhere.refuse(run, bus=bus)
    assert await bus.depth(TRAJECTORIES) == 2
