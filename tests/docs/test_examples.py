"""The run files of examples/: every key is known, and the files that newcomers run can work."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.data.row_check import RowLimits
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.launch.assembly import data
from asyncrl.launch.checks.run_file import check
from asyncrl.rewards.load import load_reward
from tests import ROOT
from tests.harness.rollouts import on_demo, sample_of

EXAMPLES = ROOT / "examples"
TUTORIAL = (ROOT / "docs" / "start" / "tutorial.md").read_text()


@pytest.mark.parametrize("name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.toml")))
def test_every_example_is_a_run_file(name: str) -> None:
    assert config.load(EXAMPLES / name).run.steps > 0


def test_the_example_for_gpus_works_with_any_model(demo: Path) -> None:
    """Check it with the demo's model, whose context has 64 tokens, on a machine that may have no GPU."""
    run = config.load(EXAMPLES / "gpu.toml", [*on_demo(demo), "rollout.max_new_tokens=8"])
    check(run)  # raises ConfigError for an impossible configuration
    assert run.engine.kind == "sglang" and run.learner.backend == "megatron"


def test_the_example_of_evaluations_grades_rows_as_it_says_they_are(tmp_path: Path) -> None:
    """A right and a wrong answer to a row of each data set."""
    instructions = {"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 3}]}
    rows: dict[str, tuple[dict[str, Any], str, str]] = {
        "aime": ({"prompt": "1", "label": "204"}, "so it is \\boxed{204}", "\\boxed{205}"),
        "gpqa": ({"prompt": "2", "label": "C"}, "The answer is C", "The answer is D"),
        "ifbench": ({"prompt": "3", "metadata": instructions}, "1 and 2 and 3", "none"),
    }
    run = config.load(EXAMPLES / "evaluation.toml")
    assert [(one.name, one.samples) for one in run.evaluation.datasets] == [("aime", 16), ("gpqa", 4), ("ifbench", 1)]
    tokenizer = make_tokenizer("0123456789")
    for one in run.evaluation.datasets:
        row, right, wrong = rows[one.name]
        file = tmp_path / one.path
        file.write_text(json.dumps(row) + "\n")
        changed = dataclasses.replace(one, path=str(file), chat_template=False, max_new_tokens=8)
        opened = data.open_set(
            changed, tokenizer=tokenizer, max_new_tokens=8, context_tokens=64, vocabulary=50, limits=RowLimits()
        )
        (question,) = opened.questions
        assert one.reward is not None
        reward = load_reward(one.reward)
        samples = [
            dataclasses.replace(sample_of(text, label=question.label), metadata=dict(question.metadata))
            for text in (right, wrong)
        ]
        given = [reward_of(one) for one in asyncio.run(reward(samples))]
        assert given == [1.0, 0.0], one.name


def reward_of(given: Any) -> float:
    return float(given.value)


def test_the_demo_works_with_sglang_as_its_first_lines_say(demo: Path) -> None:
    said = (EXAMPLES / "demo.toml").read_text()
    overrides = ["engine.kind=sglang", "engine.options={}"]
    assert " ".join(f"--set {item}" for item in overrides) in said
    run = config.load(EXAMPLES / "demo.toml", [*overrides, *on_demo(demo)])
    check(run)
    assert run.engine.kind == "sglang"


def test_the_tutorial_shows_all_that_differs_between_its_run_and_the_example_for_gpus() -> None:
    ours, shown = (
        tomllib.loads(re.search(f'```toml\n(\\[run\\]\nname = "{name}".*?)```', TUTORIAL, re.DOTALL)[1])  # type: ignore[index]
        for name in ("tutorial", "my-run")
    )
    theirs = tomllib.loads((EXAMPLES / "gpu.toml").read_text())
    differs = {
        name: {key: value for key, value in section.items() if ours.get(name, {}).get(key) != value}
        for name, section in theirs.items()
    }
    assert shown == {name: section for name, section in differs.items() if section}


@pytest.mark.slow
async def test_the_loop_wired_by_hand_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps triple the reward of random weights."""
    monkeypatch.syspath_prepend(EXAMPLES)
    await importlib.import_module("minimal_loop").main(tmp_path, steps=10)
    rows = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[0]["reward/mean"] < 0.15
    assert rows[-1]["reward/mean"] > 0.2
    assert max(row["staleness/max"] for row in rows) <= 4
