"""Which rewards are refused depends on the machine that computes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check, check_reward_worker, check_worker

CODE = ("reward.kind=code", "reward.options={}")


def test_a_reward_worker_is_refused_where_rollout_workers_grade(run_file: Path) -> None:
    check_reward_worker(config.load(run_file, ["reward.workers=1"]))
    with pytest.raises(ConfigError, match="reward.workers: is 0, so the rollout workers of this run grade"):
        check_reward_worker(config.load(run_file))


def test_a_machine_needs_what_a_reward_needs_only_where_it_grades(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # without bubblewrap
    rollout_worker = config.load(run_file, CODE)
    reward_worker = config.load(run_file, [*CODE, "reward.workers=1"])
    for check_one, run in (
        (check_worker, rollout_worker),
        (check, rollout_worker),
        (check_reward_worker, reward_worker),
        (check, reward_worker),  # this starts both
        (check, config.load(run_file, [*CODE, "reward.workers=1", "rollout.workers=0"])),
    ):
        with pytest.raises(ConfigError, match="^reward code: sandbox"):
            check_one(run)
    check_worker(reward_worker)
    check(config.load(run_file, [*CODE, "rollout.workers=0"]))
    data = f'evaluation.datasets=[{{name = "a", path = "{reward_worker.data.path}"}}]'
    with pytest.raises(ConfigError, match="^reward code: sandbox"):
        check_worker(config.load(run_file, [*CODE, "reward.workers=1", "evaluation.every_steps=1", data]))


def test_groups_larger_than_a_message_need_no_warning_as_they_are_requested_in_pieces(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = config.load(run_file, ["reward.workers=1", "rollout.group_size=1000", "bus.max_message_bytes=1000000"])
    assert run.largest_group_bytes > run.bus.max_message_bytes
    check(run)
    assert not caplog.messages
