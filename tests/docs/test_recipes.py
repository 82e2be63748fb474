"""The recipes' run files pass `asyncrl check` with models of full size, and need the memory that the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.backends import flops, huggingface
from asyncrl.config.run import RunConfig
from asyncrl.launch.checks.run_file import check
from tests import ROOT
from tests.harness import config_only

RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "guides" / "recipes.md").read_text()
ROW = re.compile(r"^\| \[(\w+)\]\(\S+\) \| .+? \| (\d+) of (\d+) \| (\d+) \| (\d+) s \|$", re.MULTILINE)
SAID = {name: tuple(map(int, numbers)) for name, *numbers in ROW.findall(PAGE)}
GIB = 2**30


def test_every_recipe_has_a_row() -> None:
    assert SAID.keys() == {path.stem for path in RECIPES.glob("*.toml")}


@pytest.mark.parametrize("name", sorted(SAID))
def test_a_recipe_can_work_and_fits_as_its_row_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    path = RECIPES / f"{name}.toml"
    model = config_only.write(Path(config.load(path).model.path).name, tmp_path / "model")
    places = {
        "model.path": model.name,
        "data.path": "rows.jsonl",
        "run.directory": "runs",
        "weights.directory": "weights",
    }
    run = config.load(path, [f'{key}="{tmp_path / value}"' for key, value in places.items()])
    check(run)
    gpu_bytes = int(SAID[name][1] * GIB)
    found = registry.backend_class(run).memory(run, registry.algorithm(run), gpu_bytes=gpu_bytes)
    needed, host = max(phase.device for phase in found), max(phase.host for phase in found)
    assert (round(needed / GIB), round(host / GIB)) == (SAID[name][0], SAID[name][2])
    assert needed < 0.95 * SAID[name][1] * GIB
    assert step_seconds(run, model) == pytest.approx(SAID[name][3], rel=0.2)


def step_seconds(run: RunConfig, model: Path) -> float:
    """The page's estimate of a step of the learner."""
    shape = huggingface.read_shape(model)
    tokens = run.learner.groups_per_batch * run.rollout.group_size * run.rollout.max_new_tokens / 2
    passes = (4.0 if run.learner.lora.rank else 6.0) + 2.0 * (run.learner.options.get("recompute") == "full")
    rate = run.learner.ranks * flops.PEAK_BF16["H100"] * (0.2 if shape.experts else 0.4)
    return passes * flops.matrix_parameters(shape) * tokens / rate
