"""Every row of the table is what it says, from the run file's name to the number that is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import app, check, config
from asyncrl.data import demo_task
from asyncrl.policies.algorithms import ALGORITHMS, Algorithm, resolve

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and prompts."""
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    parts = (algorithm.advantage, algorithm.loss, algorithm.aggregation, *algorithm.correction)
    return {part.name: dict(part.options) for part in parts}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_demo_run_file_becomes_any_row_by_its_name_alone(name: str, task: Path) -> None:
    teacher = [f"teacher.path={task / 'model'}"] if name == "opd" else []
    paths = [f"model.path={task / 'model'}", f"data.path={task / 'prompts.jsonl'}"]
    run = config.load(DEMO, [f"algorithm.name={name}", *paths, *teacher])
    check.check(run)
    own = resolve(ALGORITHMS[name])
    longest = own.aggregation.at_most(run.rollout.max_new_tokens, unless={})
    assert options_of(app.algorithm(run)) == options_of(replace(own, aggregation=longest))


def test_check_says_what_is_trained_with_every_option_and_which_models_are_loaded(task: Path) -> None:
    overrides = ["algorithm.correction=tis_token + k_stat", 'algorithm.options={cap=3, "k_stat.high"=0.02}']
    more = [f"model.path={task / 'model'}", f"data.path={task / 'prompts.jsonl'}", "reference.kl_coef=0.1"]
    said = check.describe(config.load(DEMO, ["algorithm.name=ppo", *overrides, *more])).splitlines()
    for line in (
        'advantage         gae (gamma = 1.0, lam = 1.0, truncated = "end")',
        "loss              ppo_clip (clip_low = 0.2, clip_high = 0.2)",
        "aggregation       token_mean",
        'correction        tis_token (cap = 3.0) + k_stat (statistic = "k3", over = "mean", low = -inf, high = 0.02)',
        f"models            policy {task / 'model'}, critic {task / 'model'}, reference {task / 'model'}",
    ):
        assert line in said
