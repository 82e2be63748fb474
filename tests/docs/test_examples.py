"""The run files of examples/: every key is known, and the files that newcomers run can work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.launch.checks.run_file import check
from tests import ROOT
from tests.harness.rollouts import on_demo

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
def test_the_loop_wired_by_hand_learns(tmp_path: Path) -> None:
    """Run in a separate process, as a reader starts it; ten steps triple the reward of random weights."""
    code = f"import asyncio, minimal_loop; asyncio.run(minimal_loop.main(Path({str(tmp_path)!r}), steps=10))"
    command = [sys.executable, "-c", f"from pathlib import Path; {code}"]
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[0]["reward/mean"] < 0.15
    assert rows[-1]["reward/mean"] > 0.2
    assert max(row["staleness/max"] for row in rows) <= 4
