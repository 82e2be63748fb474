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
from asyncrl.launch.checks import resume_checks, signal_files
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.launch.checks.signal_files import digest_files
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
    signal_files.record(digest_files(run), run.run_directory, incarnation=incarnation)


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


def resume(run: RunConfig, *, step: int = 0, outstanding: int = 0) -> None:
    """Name the changes as a learner does that goes on at ``step``."""
    prompts = PromptState(position=5, outstanding={number: number for number in range(outstanding)})
    state = dataclasses.replace(LearnerState.fresh(), step=step, policy_version=step, prompts=prompts)
    resume_checks.name_changes(run, state, data={}, files=digest_files(run))


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "rope_theta": 1e4} | config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_refuses_another_model_but_not_a_moved_one(
    run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, moved = write_model(tmp_path / "one"), write_model(tmp_path / "moved", transformers_version="9")
    two = write_model(tmp_path / "two", num_hidden_layers=2)
    begin(set_to(run, f"model.path={one}"))
    save_checkpoint(run, incarnation=0)
    resume_checks.check_settings(set_to(run, f"model.path={moved}"))
    resume(set_to(run, f"model.path={moved}"))
    assert "resumed with another setting: model.path" in caplog.text
    with pytest.raises(ConfigError, match="model.path: this run trains .*/one, and .*/two is another model"):
        resume_checks.check_settings(set_to(run, f"model.path={two}"))


def test_refuses_a_model_whose_config_changed_in_its_folder(
    run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = set_to(run, f"model.path={write_model(tmp_path / 'one')}")
    begin(run)
    write_model(tmp_path / "one", rope_theta=5e5)
    resume_checks.check_settings(run)  # no checkpoint yet: the run starts from this model
    resume(run)
    assert caplog.messages == [
        "changed since this run was last up: model.path: config.json (rope_theta 10000.0 -> 500000.0)"
    ]
    save_checkpoint(run, incarnation=0)
    with pytest.raises(ConfigError, match="no longer that of this run .rope_theta 10000.0 -> 500000.0.*put the file"):
        resume_checks.check_settings(run)


def test_names_a_tokenizer_and_weights_of_a_reference_that_changed(
    run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "one")
    (write_model(tmp_path / "old") / "model.safetensors").write_bytes(b"1")
    run = set_to(run, f"model.path={tmp_path / 'one'}", f"reference.path={tmp_path / 'old'}", "reference.kl_coef=0.1")
    begin(run)
    (tmp_path / "one" / "tokenizer.json").write_text("{ }")
    (tmp_path / "old" / "model.safetensors").write_bytes(b"2")
    resume(run)
    assert caplog.messages == [
        "changed since this run was last up: model.path: tokenizer.json",
        "changed since this run was last up: reference.path: model.safetensors",
    ]


def test_names_a_package_of_another_version(
    run: RunConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.checks.signal_files.VERSION", "0.1")
    begin(run)
    monkeypatch.setattr("asyncrl.launch.checks.signal_files.VERSION", "0.2")
    resume(run)
    assert caplog.messages == ['changed since this run was last up: the package asyncrl "0.1" -> "0.2"']


def test_says_that_nothing_is_compared_with_a_record_that_cannot_be_read(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    resume(run)
    assert not caplog.messages  # the run has never begun
    settings = config_record.as_table(run)
    settings["learner"]["of_another_version"] = 1
    history = History(run.run_directory / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=settings)
    history.close()
    resume(set_to(run, "reward.kind=exact"))
    (line,) = caplog.messages
    assert line.startswith("the settings are not compared with those before, which cannot be read: ")
    assert "of_another_version" in line


def test_names_every_other_change_in_a_line(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    begin(run)
    resume(set_to(run, "run.steps=99", "bus.ack_seconds=9"))
    assert not caplog.messages
    changed = ("engine.kind=sglang", "reward.kind=dapo", "reward.options.a=1", "metrics.tensorboard=true")
    resume(set_to(run, "rollout.group_size=4", "algorithm.name=rloo", "reference.kl_coef=0.5", *changed), step=1)
    said = [line.removeprefix("resumed with another setting: ") for line in caplog.messages]
    assert [line.partition(" ")[0] for line in said] == [
        "algorithm.name",
        "engine.kind",
        "metrics.tensorboard",
        "reference",
        "reward.kind",
        "reward.options.a",
        "rollout.group_size",
    ]
    assert said[0] == 'algorithm.name "grpo" -> "rloo"' and said[5:] == [
        "reward.options.a unset -> 1",
        "rollout.group_size 8 -> 4",
    ]


def test_says_that_a_bound_follows_the_learning_rate_and_how_to_keep_the_one_before(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    begin(run)  # 4 versions: of the run file, or the default of an older release
    resume(set_to(run, "staleness.max_staleness=auto", "learner.learning_rate=5e-3"))
    line = 'staleness.max_staleness 4 -> 2 ("auto", for learning_rate 0.005; set 4 to keep it)'
    assert f"resumed with another setting: {line}" in caplog.messages
    caplog.clear()
    resume(set_to(run, "staleness.max_staleness=2"))
    assert caplog.messages == ["resumed with another setting: staleness.max_staleness 4 -> 2"]


def test_says_nothing_of_the_bus_of_a_learner_that_ran_elsewhere(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The address is that of the run file, and the recorded one is not used for anything."""
    own = set_to(run, "bus.url=nats://bus:4222")
    begin(own)
    resume_checks.check_settings(own)
    resume(own)
    assert not caplog.messages


def test_names_only_the_changed_key_of_a_data_set_and_never_a_secret() -> None:
    def table(**more: object) -> dict[str, object]:
        return {"evaluation": {"datasets": [{"name": "one", "samples": 1}, {"name": "two", "samples": 2} | more]}}

    assert resume_checks.changes(table(), table(samples=3)) == ["evaluation.datasets.two.samples 2 -> 3"]
    same = [{"path": "a", "weight": 1.0}, {"path": "a", "weight": 2.0}]
    assert resume_checks.changes({"files": same}, {"files": [same[0], same[1] | {"weight": 3.0}]}) == [
        "files.2.weight 2.0 -> 3.0"
    ]
    run = config.load(ROOT / "examples" / "demo.toml", ["reward.options.api_key=secret"])
    other = config.load(ROOT / "examples" / "demo.toml", ["reward.options.api_key=other"])
    assert config_record.as_table(run)["reward"]["options"] == {"api_key": "***"}
    assert not resume_checks.changes(config_record.as_table(run), config_record.as_table(other))


def test_names_a_learning_rate_that_more_steps_raise(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    cosine = (
        "learner.schedule=cosine",
        "learner.learning_rate=3e-3",
        "learner.warmup_steps=0",
        "learner.decay_steps=0",
        "learner.min_learning_rate=0.0",
    )
    begin(set_to(run, *cosine, "run.steps=6"))
    resume(set_to(run, *cosine, "run.steps=12"), step=6)
    assert caplog.messages[-1].startswith("the learning rate goes from 0.000201 at step 6 to 0.0015 at step 7 ")
    caplog.clear()
    resume(set_to(run, *cosine, "run.steps=12", "learner.decay_steps=6"), step=6)
    assert "the learning rate" not in caplog.text


def test_names_groups_that_keep_what_they_were_asked_with(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    begin(run)
    resume(set_to(run, "rollout.max_new_tokens=4"), outstanding=20)
    assert caplog.messages[-1] == (
        "rollout.max_new_tokens: the 20 prompt groups that are under way keep what they were asked with"
    )


def test_names_the_steps_that_were_lost_with_a_learner(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    begin(run)
    history = History(run.run_directory / HISTORY_FILE, incarnation=0)
    history.record_trained([1], step=9, max_staleness=0)
    history.close()
    resume(run, step=7)
    assert caplog.messages[-1].startswith("steps 8 to 9 are lost with the learner before and are trained again; groups")


@pytest.mark.parametrize("change", ["data.path=more.jsonl", "run.seed=7"])
def test_names_data_in_another_order(run: RunConfig, caplog: pytest.LogCaptureFixture, change: str) -> None:
    begin(run)
    resume(set_to(run, change))
    assert change.partition("=")[0] in caplog.messages[0]
    assert caplog.messages[1].startswith("the data may have another order now: the run goes on at position 5")


async def test_names_the_data_file_that_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    demo_task.write(tmp_path)
    run, prompts = demo_run(tmp_path), tmp_path / "prompts.jsonl"
    warnings = []
    for rows in (32, 32, 20):
        prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:rows]))
        learner, _ = await build_learner(run, bus=memory_bus(), resume=False)
        await learner.stop()
        warnings.append([record.getMessage() for record in caplog.records if record.name == "asyncrl.learner"])
        caplog.clear()
    assert warnings[:2] == [[], []]
    changed, order = warnings[2]
    assert changed == f"changed since this run was last up: the data {prompts}"
    assert order.startswith("the data may have another order")


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
