from __future__ import annotations

import pytest

from asyncrl import config
from asyncrl.environments import load
from asyncrl.errors import ConfigError


def agent(program: str) -> config.RolloutSection:
    options = {"harness": "command", "harness_options": {"command": [program]}}
    return config.RolloutSection(function="agent", options=options)


def test_an_agent_whose_program_is_not_here_is_refused_before_the_run_starts() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.options\.harness_options.*no-such-program"):
        load.check_machine(agent("no-such-program"))


def test_an_agent_whose_program_is_here_and_functions_without_a_machine_s_needs_pass() -> None:
    for section in (agent("sh"), config.RolloutSection()):
        load.check_machine(section)  # would raise ConfigError


def test_a_harness_that_cannot_be_imported_is_refused_before_the_run_starts() -> None:
    section = config.RolloutSection(function="agent", options={"harness": "no_such_package.module:Play"})
    problem = r"^rollout\.options\.harness: 'no_such_package\.module:Play' cannot be imported: ModuleNotFoundError"
    with pytest.raises(ConfigError, match=problem):
        load.check_machine(section)
