"""A harness ends in time."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.environments.agent.harnesses.load import Limited, Limits, load_harness
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.errors import ConfigError, RolloutError
from tests.unit.environments.harnesses.tasks import ENDPOINT, TASK


async def never(task: Task, endpoint: Endpoint) -> Outcome:
    await asyncio.Event().wait()
    return Outcome()


async def raises(task: Task, endpoint: Endpoint) -> Outcome:
    raise TimeoutError("of its own")


async def test_a_sample_that_takes_too_long_is_cut_or_fails_as_the_run_file_says() -> None:
    cut = Limits(timeout_seconds=0.01, timeout_reward=-1.0)
    outcome = await Limited(never, name="never", limits=cut)(TASK, ENDPOINT)
    assert (outcome.finish_reason, outcome.reward, outcome.metrics) == ("length", -1.0, {"timeout": 1.0})
    fails = Limits(timeout_seconds=0.01, on_timeout="fail")
    with pytest.raises(RolloutError, match=r"harness never: took longer than timeout_seconds = 0\.01 for a sample"):
        await Limited(never, name="never", limits=fails)(TASK, ENDPOINT)


def test_a_harness_is_found_by_name_or_address_and_a_mistake_is_told_in_one_line() -> None:
    load_harness("command", {"command": ["python3"]}, limits=Limits())
    load_harness("no_such_package.module:Harness", {"processes": 2}, limits=Limits())  # a child process will import it
    for name, options, problem in (
        ("comand", {}, "rollout.options.harness: 'comand' is unknown; did you mean 'command'?"),
        ("my pkg:Harness", {}, "rollout.options.harness: 'my pkg:Harness' is not an address"),
        ("command", {"program": "x"}, "rollout.options.harness_options: unknown key 'program'"),
        ("my_pkg:Harness", {"venv": "/nowhere"}, "rollout.options.harness_options: venv: /nowhere is not a virtual"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_harness(name, options, limits=Limits())
        assert str(raised.value).startswith(problem)


def test_an_outcome_is_a_number_a_table_or_nothing() -> None:
    assert outcome_of(None) == Outcome()
    assert outcome_of(True) == Outcome(reward=1.0)
    assert outcome_of(Outcome(reward=2, turn_rewards=[1])) == Outcome(reward=2.0, turn_rewards=(1.0,))
    for wrong in ("1", [1], {"reward": "1"}, {"reward": float("inf")}, {"turn_rewards": 1}, {"metrics": [1]}):
        with pytest.raises(ValueError, match=r"."):
            outcome_of(wrong)


def test_a_name_of_both_a_part_and_a_metric_is_refused_as_one_would_hide_the_other() -> None:
    both = {"reward": 1, "reward_parts": {"right": 1}, "metrics": {"right": 0, "turns": 2}}
    with pytest.raises(ValueError, match="'right' is in reward_parts and in metrics"):
        outcome_of(both)
    with pytest.raises(ValueError, match="'right' is in reward_parts and in metrics"):
        outcome_of(Outcome(reward_parts={"right": 1.0}, metrics={"right": 1.0}))
    assert outcome_of(both | {"metrics": {"turns": 2}}).metrics == {"turns": 2.0}
