"""The run files of examples/: every key is known, and what a newcomer would run can work."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.commands.check import check
from asyncrl.data import demo_task

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and prompts."""
    folder = tmp_path_factory.mktemp("demo")
    demo_task.write(folder)
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_every_example_is_a_run_file(name: str) -> None:
    assert config.load(EXAMPLES / name).run.steps > 0


def test_the_example_for_gpus_works_with_any_model(demo: Path) -> None:
    """Here with the demo's, whose context has 64 tokens; where there is no GPU nobody gets one."""
    small = [f'model.path="{demo / "model"}"', f'data.path="{demo / "prompts.jsonl"}"', "rollout.max_new_tokens=8"]
    check(config.load(EXAMPLES / "gpu.toml", small))


def test_the_demo_works_with_sglang_as_its_first_lines_say(demo: Path) -> None:
    said = (EXAMPLES / "demo.toml").read_text()
    overrides = ["engine.kind=sglang", "engine.options={}"]
    assert " ".join(f"--set {item}" for item in overrides) in said
    small = [f'model.path="{demo / "model"}"', f'data.path="{demo / "prompts.jsonl"}"']
    check(config.load(EXAMPLES / "demo.toml", [*overrides, *small]))
