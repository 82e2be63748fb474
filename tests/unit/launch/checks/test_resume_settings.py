"""Resuming: which changes of settings are refused or named, and when a run is restarted from its beginning."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.bus.port import Bus
from asyncrl.cli import learner
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.checks import resume_checks
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.policies.groups.saved import LearnerState, PromptState
from tests import ROOT
from tests.harness.buses import progress, publish_groups
from tests.harness.checkpoints import write_checkpoint
from tests.harness.learning import demo_run, memory_bus


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return config.load(ROOT / "examples" / "demo.toml", [f"run.directory={tmp_path}"])


def set_to(run: RunConfig, *overrides: str) -> RunConfig:
    return config.load(ROOT / "examples" / "demo.toml", [f"run.directory={run.run.directory}", *overrides])


def begin(run: RunConfig, *, incarnation: int = 0) -> None:
    history = History(run.run_directory / HISTORY_FILE, incarnation=incarnation)
    history.begin(step=0, kept=0, max_staleness=4, settings=config_record.as_table(run))
    history.close()


def test_refuses_checkpoints_of_another_backend(run: RunConfig) -> None:
    resume_checks.check_settings(run)  # the run has never begun
    begin(run)
    other = set_to(run, "learner.backend=reference")
    resume_checks.check_settings(other)  # no checkpoint yet
    (run.run_directory / "checkpoints" / "step-00000020").mkdir(parents=True)
    resume_checks.check_settings(run)
    with pytest.raises(ConfigError, match='learner.backend: the checkpoints of this run are those of "megatron"'):
        resume_checks.check_settings(other)


def test_refuses_checkpoints_of_other_adapters(run: RunConfig) -> None:
    begin(set_to(run, "learner.lora.rank=8"))
    (run.run_directory / "checkpoints" / "step-00000020").mkdir(parents=True)
    resume_checks.check_settings(set_to(run, "learner.lora.rank=8", "learner.lora.publish=adapter"))
    for change, is_now in (
        ("rank=16", "rank 16, alpha 32"),
        ("alpha=8.0", "rank 8, alpha 8"),
        ("rank=0", "not of the whole"),
    ):
        with pytest.raises(ConfigError, match=f"learner.lora: the checkpoints .* of adapters of rank 8.*{is_now}"):
            resume_checks.check_settings(set_to(run, "learner.lora.rank=8", f"learner.lora.{change}"))


def test_refuses_a_critic_if_the_newest_checkpoint_has_none(run: RunConfig) -> None:
    ppo = set_to(run, "algorithm.name=ppo")
    begin(run)
    resume_checks.check_settings(ppo)  # no checkpoint yet
    save_checkpoint(run, incarnation=0)
    with pytest.raises(ConfigError, match='algorithm: "ppo" trains a critic, and the newest checkpoint .* has none'):
        resume_checks.check_settings(ppo)


def save_checkpoint(run: RunConfig, *, incarnation: int) -> None:
    ledger = {"watermark": 0, "beyond": []}
    state = LearnerState(
        incarnation=incarnation, step=0, policy_version=0, groups=ledger, consumed=ledger, prompts=PromptState()
    )
    folder = run.run_directory / "checkpoints"
    write_checkpoint(folder, state, save_backend=lambda folder: (folder / "backend.json").touch(), keep=1)


def test_refuses_another_model_but_not_a_moved_one(
    run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, layers in (("one", 1), ("moved", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    begin(set_to(run, f"model.path={tmp_path / 'one'}"))
    resume_checks.check_settings(set_to(run, f"model.path={tmp_path / 'moved'}"))
    assert "resumed with other settings: model.path" in caplog.text
    with pytest.raises(ConfigError, match="model.path: this run trains .*/one, and .*/two is another model"):
        resume_checks.check_settings(set_to(run, f"model.path={tmp_path / 'two'}"))


def test_names_every_other_change(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    begin(run)
    resume_checks.check_settings(set_to(run, "run.steps=99", "bus.ack_seconds=9"))
    assert not caplog.messages
    resume_checks.check_settings(set_to(run, "rollout.group_size=4", "algorithm.name=rloo"))
    assert caplog.messages == [
        'resumed with other settings: algorithm.name "grpo" -> "rloo"; rollout.group_size 8 -> 4',
    ]


@pytest.mark.parametrize("change", ["data.path=more.jsonl", "run.seed=7"])
def test_names_data_in_another_order(run: RunConfig, caplog: pytest.LogCaptureFixture, change: str) -> None:
    begin(run)
    resume_checks.check_settings(set_to(run, change))
    assert change.partition("=")[0] in caplog.messages[0]
    assert "the data has another order now" in caplog.messages[1]


async def test_names_the_data_file_that_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    demo_task.write(tmp_path)
    run, prompts = demo_run(tmp_path), tmp_path / "prompts.jsonl"
    warnings = []
    for rows in (32, 32, 20):
        prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:rows]))
        learner, _ = await build_learner(run, bus=memory_bus(), resume=False)
        await learner.stop()
        warnings.append([record.getMessage() for record in caplog.records if record.name == "asyncrl.check"])
        caplog.clear()
    assert [len(said) for said in warnings] == [0, 0, 1]
    assert warnings[2][0].startswith(f"{prompts} changed since this run was last up: the data may have another order")


def test_refuses_a_learner_that_is_started_by_hand(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "check_learner", lambda _: None)
    begin(run)
    (run.run_directory / "checkpoints" / "step-00000020").mkdir(parents=True)
    with pytest.raises(ConfigError, match="learner.backend: the checkpoints of this run"):
        learner.run_learner(set_to(run, "learner.backend=reference"), resume=True, token="")


REFUSED = r"run.directory: .* has no checkpoint of run 'demo', which is at step 3; resume it with the run.directory "


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
