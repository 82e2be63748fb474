"""A run is resumed only where its checkpoints are; elsewhere it is refused at once."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import resume_checks
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from tests import ROOT
from tests.harness.buses import progress, publish_groups

REFUSED = r"run.directory: .* has no checkpoint of run 'demo', which is at step 3; resume it with the run.directory "


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return config.load(ROOT / "examples" / "demo.toml", [f"run.directory={tmp_path}"])


async def test_does_not_restart_a_run_whose_log_was_trimmed(bus: Bus, run: RunConfig) -> None:
    await bus.put(PROGRESS, progress(3))
    await publish_groups(bus, 0, 1, 2)
    await bus.trim(TRAJECTORIES, through=2)
    with pytest.raises(ConfigError, match=REFUSED) as refused:
        await resume_checks.require_checkpoint(run, bus=bus)
    assert "\n" not in str(refused.value)


async def test_does_not_restart_a_finished_run(bus: Bus, run: RunConfig) -> None:
    """Even if its log was kept."""
    await bus.put(PROGRESS, dataclasses.replace(progress(3), finished=True))
    await publish_groups(bus, 0)
    with pytest.raises(ConfigError, match=REFUSED):
        await resume_checks.require_checkpoint(run, bus=bus)


async def test_restarts_a_run_that_was_killed_before_its_first_checkpoint(bus: Bus, run: RunConfig) -> None:
    await bus.put(PROGRESS, progress(3))
    await publish_groups(bus, 0, 1)
    await resume_checks.require_checkpoint(run, bus=bus)
    assert await bus.depth(TRAJECTORIES) == 2


async def test_says_that_it_restarts_because_of_a_damaged_checkpoint(
    bus: Bus, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    damaged_checkpoint(run)
    await publish_groups(bus, 0, 1)
    with caplog.at_level(logging.WARNING, "asyncrl.learner"):
        assert await resume_checks.find_checkpoint(run, bus=bus) is None
    assert "only damaged-step-00000005 is left; starting at step 0, from the whole log" in caplog.text


def damaged_checkpoint(run: RunConfig) -> None:
    (run.run_directory / "checkpoints" / "step-00000005").mkdir(parents=True)
