"""Routing replay is on where it is possible and useful; an explicit request that is impossible is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.sglang import engine as sglang
from asyncrl.engines.sglang.checks import numbers
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize
from tests.harness.families import make_tiny_family
from tests.unit.launch.checks.test_run_file import RUN_FILE

GROUP_BYTES = 8 * (1024 + 8) * 2 * 2
"""Size of a group's experts: samples x (prompt + answer) x layers x experts per token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    demo_task.write(path)
    make_tiny_model(path / "model", architecture="qwen3_moe")
    make_tiny_model(path / "dense")
    make_tiny_family(path / "mixtral", architecture="mixtral")
    (path / "run.toml").write_text(RUN_FILE.format(folder=path))
    return path


def made(folder: Path, *overrides: str) -> RunConfig:
    return config.load(folder / "run.toml", overrides)


def test_is_on_by_default_for_a_mixture_of_experts(folder: Path) -> None:
    run = made(folder)
    replay = registry.routing_replay(run)
    assert (replay.is_on, replay.num_bytes) == (True, GROUP_BYTES)
    assert registry.largest_group_bytes(run) == run.largest_group_bytes + GROUP_BYTES
    assert f"routing replay    on, up to {GROUP_BYTES:,} bytes a group" in str(summarize(run))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('model.path="{folder}/dense"', "the model at .*dense has no experts"),
        ('learner.backend="reference"', 'learner.backend = "reference" does not replay them; "megatron" does'),
        ("bus.max_group_bytes=49000", "a group with its experts may take .*, over bus.max_group_bytes"),
    ],
)
def test_is_off_where_impossible_and_refused_if_required(folder: Path, setting: str, reason: str) -> None:
    setting = setting.format(folder=folder)
    found = registry.routing_replay(made(folder, setting))
    assert not found.is_on
    assert found.num_bytes == 0
    with pytest.raises(ConfigError, match=f'rollout.routing_replay: "on" cannot be: {reason}'):
        check(made(folder, setting, 'rollout.routing_replay="on"'))
    with pytest.raises(ConfigError, match=f"learner.experts_directory: no experts are replayed: {reason}"):
        check(made(folder, setting, f'learner.experts_directory="{folder}"'))


@pytest.mark.parametrize("model", ["mixtral", "model"])
@pytest.mark.parametrize("version", ["", "0.5.16", "0.5.21.post1", "0.5.22rc1", "0.5.23"])
def test_a_server_that_cannot_report_the_experts_of_this_model_leaves_it_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, model: str
) -> None:
    """Such a server would die minutes later, in each of its starts. Versions that nobody knows pass."""
    monkeypatch.setattr(sglang, "installed_version", lambda: numbers(version))
    settings = ('engine.kind="sglang"', f'model.path="{folder}/{model}"')
    found = registry.routing_replay(made(folder, *settings))
    if not (is_too_old := model == "mixtral" and "0" < version < "0.5.22"):
        assert found.is_on
    else:
        now = ".".join(version.split(".")[:3])
        assert str(found) == (
            f"off: SGLang {now} cannot report the experts of a MixtralForCausalLM; install 0.5.22 or later"
        )
    with pytest.raises(ConfigError, match=found.reason + '; or use "off"') if is_too_old else nullcontext():
        check(made(folder, *settings, 'rollout.routing_replay="on"'))


def test_group_larger_than_a_message_has_experts_only_on_request(folder: Path) -> None:
    run = made(folder, "bus.max_message_bytes=49000")
    over = 'over bus.max_message_bytes (49,000); rollout.routing_replay = "on" sends it in pieces'
    assert over in registry.routing_replay(run).reason
    assert registry.routing_replay(made(folder, "bus.max_message_bytes=49000", 'rollout.routing_replay="on"')).is_on


@pytest.mark.parametrize("setting", ['rollout.routing_replay="off"', 'algorithm.correction="none"'])
def test_is_off_on_request(folder: Path, setting: str) -> None:
    assert not registry.routing_replay(made(folder, setting)).is_on
