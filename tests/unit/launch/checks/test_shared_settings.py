"""Two processes have the same checksum if they share the settings that belong to the run, not to a machine."""

from __future__ import annotations

import pytest

from asyncrl import config
from asyncrl.launch.checks.shared_settings import settings_checksum


@pytest.mark.parametrize(
    ("override", "differs"),
    [
        ('reward.kind="exact"', True),
        ('reward.rows={code = "json:loads"}', True),
        ('rollout.function="json:loads"', True),
        ('data.reward_key="kind"', True),
        ("staleness.max_staleness=7", True),
        ('weights.channel="objects"', True),
        ("rollout.max_running=3", False),
        ("reward.timeout_seconds=3", False),
        ('model.path="elsewhere"', False),
    ],
)
def test_checksum_differs_if_and_only_if_a_setting_of_the_run_differs(override: str, differs: bool) -> None:
    here, there = settings_checksum(config.only_overrides([])), settings_checksum(config.only_overrides([override]))
    assert (here != there) == differs
