"""Tokens are computed once where backend and models can; an explicit request that is impossible is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.launch.summary import summarize
from tests.harness.families import make_tiny_family
from tests.unit.launch.checks.test_run_file import RUN_FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    demo_task.write(path)
    make_tiny_model(path / "model")
    make_tiny_family(path / "linear", architecture="qwen3_next")
    (path / "run.toml").write_text(RUN_FILE.format(folder=path))
    return path


def made(folder: Path, *overrides: str) -> RunConfig:
    return config.load(folder / "run.toml", [one.format(folder=folder) for one in overrides])


def test_it_is_on_by_default_on_megatron(folder: Path) -> None:
    for layout in ((), ("learner.ranks=4", "learner.context_parallel=2", "learner.tensor_parallel=2")):
        run = made(folder, *layout)
        assert registry.shared_prefixes(run).is_on
    assert "shared prefixes   on" in str(summarize(made(folder)))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('learner.backend="reference"', 'learner.backend = "reference" computes every sequence whole'),
        ('model.path="{folder}/linear"', "model.path has linear attention, whose state runs through a whole sequence"),
    ],
)
def test_it_is_off_where_impossible_and_refused_if_required(folder: Path, setting: str, reason: str) -> None:
    found = registry.shared_prefixes(made(folder, setting))
    assert str(found).startswith(f"off: {reason}")
    with pytest.raises(ConfigError, match=f'learner.shared_prefixes: "on" cannot be: {reason}'):
        registry.shared_prefixes(made(folder, setting, 'learner.shared_prefixes="on"'))


def test_it_can_be_switched_off(folder: Path) -> None:
    assert str(registry.shared_prefixes(made(folder, 'learner.shared_prefixes="off"'))).startswith("off")
