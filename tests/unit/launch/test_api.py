"""A run from Python: its meaning, what is refused, and its records as rows. tests/integration trains with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.actors.learner.history import seal
from asyncrl.config.toml_text import toml_text
from asyncrl.data import demo_task
from asyncrl.launch.processes.process_manager import Outcome
from tests import ROOT

DEMO = ROOT / "examples" / "demo.toml"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def test_import_of_the_package_is_light() -> None:
    code = (
        "import sys, asyncrl\n"
        "assert 'Run' in dir(asyncrl)\n"
        "sys.exit(str({'torch', 'numpy', 'transformers', 'nats', 'aiohttp'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def test_overrides_are_a_table_or_command_line_text() -> None:
    table = {"run.steps": 7, "run.name": "x", "engine.options": {"threads": 2}, "learner.betas": (0.5, 0.9)}
    by_table = asyncrl.Run.from_file(DEMO, overrides=table)
    by_words = asyncrl.Run.from_file(
        str(DEMO), overrides=["run.steps=7", "run.name=x", "engine.options={threads=2}", "learner.betas=[0.5, 0.9]"]
    )
    assert by_table.settings == by_words.settings
    assert by_table.settings.engine.options == {"threads": 2}
    assert by_table.folder == Path("runs/x")


@pytest.mark.parametrize("value", [1, 0.5, True, 'a "quoted" word', [1, 2], {"a": [1.5, "b"], "c": {}}])
def test_writes_values_as_toml(value: object) -> None:
    run = asyncrl.Run.from_file(DEMO, overrides={"engine.options": {"key": value}})
    assert run.settings.engine.options == {"key": value}
    assert toml_text((1, 2)) == "[1, 2]"


def test_mistake_is_one_line() -> None:
    with pytest.raises(asyncrl.ConfigError, match="did you mean 'steps'") as error:
        asyncrl.Run.from_file(DEMO, overrides={"run.stesp": 7})
    assert "\n" not in str(error.value)
    with pytest.raises(asyncrl.ConfigError, match=r"nowhere.toml: no such run file"):
        asyncrl.Run.from_file("nowhere.toml")
    with pytest.raises(asyncrl.ConfigError, match=r"nowhere: no such run folder"):
        asyncrl.open_run("nowhere")


def test_check_returns_derived_settings(task: Path) -> None:
    files = {"model.path": str(task / "model"), "data.path": str(task / "prompts.jsonl")}
    made = asyncrl.Run.from_file(DEMO, overrides=files | {"staleness.max_staleness": 3}).check()
    assert (made.algorithm, made.loss.name, made.num_prompts) == ("grpo", "ppo_clip", 32)
    assert (made.max_staleness, made.window, made.samples_per_step) == (3, 4 * 16, 16 * 8)
    assert made.models == {"policy": task / "model"}
    with pytest.raises(asyncrl.ConfigError, match=r"data.path: nowhere.jsonl: no such data file"):
        asyncrl.Run.from_file(DEMO, overrides=files | {"data.path": "nowhere.jsonl"}).check()


async def test_blocking_call_in_an_event_loop_names_the_async_one() -> None:
    with pytest.raises(asyncrl.ConfigError, match=r"use await train\(\)"):
        asyncrl.Run.from_file(DEMO).train_sync()


async def test_run_that_ends_before_its_learner_starts_says_why(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def launch(*_: Any, **__: Any) -> Outcome:
        (tmp_path / "runs" / "demo" / "logs").mkdir(parents=True)
        return Outcome(exit_code=3, reason="learner ended: no GPU")

    monkeypatch.setattr("asyncrl.launch.api.launch", launch)
    files = {"model.path": str(task / "model"), "data.path": str(task / "prompts.jsonl")}
    result = await asyncrl.Run.from_file(DEMO, overrides=files | {"run.directory": str(tmp_path / "runs")}).train()
    assert (result.reason, result.exit_code, result.steps, result.model) == ("learner ended: no GPU", 3, 0, None)


def test_last_record_of_a_retrained_step_counts(tmp_path: Path) -> None:
    """A learner dies in step 3 and is resumed from the checkpoint of step 1."""
    settings = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}}

    def begun(incarnation: int, step: int, kept: int) -> dict[str, object]:
        entry = {"kind": "begun", "incarnation": incarnation, "step": step, "kept": kept, "max_staleness": 4}
        return entry | {"settings": settings}

    def trained(incarnation: int, step: int, groups: list[int]) -> dict[str, object]:
        return {"kind": "trained", "incarnation": incarnation, "step": step, "groups": groups, "max_staleness": 0}

    first = [begun(0, 0, 0), trained(0, 1, [0, 1])]
    kept = sum(len(seal(entry)) for entry in first)
    lost = [trained(0, 2, [2, 3]), trained(0, 3, [4, 5])]
    second = [begun(1, 1, kept), {"kind": "dropped", "incarnation": 1, "step": 1, "groups": [2]}, trained(1, 2, [3, 4])]
    (tmp_path / "history.jsonl").write_bytes(b"".join(map(seal, (*first, *lost, *second))))
    rows = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 0.3}]
    rows.append({"step": 2, "loss": 0.4, "learner/incarnation": 1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = asyncrl.open_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.metrics()] == [(1, 0.1), (2, 0.4)]
    groups = [(row["group_id"], row["outcome"], row["step"], row["incarnation"]) for row in run.groups()]
    assert groups == [
        (0, "trained", 1, 0),
        (1, "trained", 1, 0),
        (2, "dropped", 1, 1),
        (3, "trained", 2, 1),
        (4, "trained", 2, 1),
    ]
