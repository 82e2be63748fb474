"""checkpoint.best: the best model so far, complete, with the metric that selected it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.actors.learner.best_model import RESULT_FILE, BestModel


def version(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(text)
    return folder


def test_a_better_model_takes_the_place_of_the_best(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "best", metric="aime/mean@8")
    for step, value in enumerate([0.2, 0.5, 0.5, 0.4]):
        best.keep_if_better(
            version(tmp_path / f"0-{step}", f"weights {step}"), {"evaluation/aime/mean@8": value}, order=(0, step)
        )
    assert (tmp_path / "best" / "model.safetensors").read_text() == "weights 1"
    assert json.loads((tmp_path / "best" / RESULT_FILE).read_text())["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "0-2", "0-3", "best"]


def test_a_resumed_run_knows_how_good_the_best_was(tmp_path: Path) -> None:
    BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(
        version(tmp_path / "0-1", "one"), {"evaluation/a/mean@1": 0.5}, order=(0, 1)
    )
    again = BestModel(tmp_path / "best", metric="a/mean@1")
    assert not again.keep_if_better(version(tmp_path / "1-2", "two"), {"evaluation/a/mean@1": 0.4}, order=(1, 2))
    other = BestModel(tmp_path / "best", metric="a/pass@1")  # another metric: its values cannot be compared
    assert other.keep_if_better(tmp_path / "1-2", {"evaluation/a/pass@1": 0.1}, order=(1, 2))
    assert (tmp_path / "best" / "model.safetensors").read_text() == "two"


def test_a_learner_that_died_between_two_renames_has_lost_nothing(tmp_path: Path) -> None:
    measured = {"evaluation/a/mean@1": 0.5}
    BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(
        version(tmp_path / "0-1", "one"), measured, order=(0, 1)
    )
    (tmp_path / "best").rename(tmp_path / ".best-old")
    again = BestModel(tmp_path / "best", metric="a/mean@1")
    assert not again.keep_if_better(version(tmp_path / "1-2", "two"), {"evaluation/a/mean@1": 0.4}, order=(1, 2))
    assert (tmp_path / "best" / "model.safetensors").read_text() == "one"


@pytest.mark.parametrize("metrics", [{}, {"evaluation/b/mean@1": 1.0}])
def test_without_the_metric_nothing_is_kept(metrics: dict[str, float], tmp_path: Path) -> None:
    assert not BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(tmp_path, metrics, order=(0, 1))
    assert not (tmp_path / "best").exists()
