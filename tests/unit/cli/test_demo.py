"""bin/demo's own command line; that it learns is tested in tests/integration/learning."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.cli import demo
from asyncrl.config.staleness_bound import beyond_what_was_shown
from asyncrl.errors import ConfigError


@pytest.mark.parametrize("override", ["learner.nosuch=1", "rollout.group_size=1"])
def test_a_refused_override_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(demo.RUN_FILE, tmp_path / demo.RUN_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "--set", override])
    with pytest.raises(ConfigError):
        demo.main()
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("adapters", [(), demo.ADAPTERS])
def test_a_demo_trains_no_token_older_than_its_learning_rate_allows(adapters: tuple[str, ...]) -> None:
    """Its models have random weights, also where adapters are trained."""
    run = config.load(demo.RUN_FILE, adapters)
    rate, loss = run.learner.learning_rate, "ppo_clip"
    assert not beyond_what_was_shown(rate, run.max_staleness, steps=1, trains_adapters=False, loss=loss)
