"""Versions that are kept after their channel has forgotten them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.data.model_folder import check_model
from asyncrl.tensors import quantized_model
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.kept_models import KeptModels
from tests.harness.engines import Model
from tests.harness.transfers import snapshot


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), seed=0)


def publish(models: KeptModels, model: Model, *versions: int, incarnation: int = 0) -> None:
    for version in versions:
        models.publish(snapshot(model), incarnation=incarnation, policy_version=version)


def made(folder: Path, model: Model) -> KeptModels:
    return KeptModels(folder / "models", every=3, model_path=model.folder)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_so_many_th_version_stays_as_a_model(tmp_path: Path, model: Model) -> None:
    publish(made(tmp_path, model), model, *range(8))
    assert names(tmp_path / "models") == {"0-3", "0-6"}
    check_model(tmp_path / "models" / "0-3")


def test_models_are_kept_of_versions_that_are_stored_for_nothing_else(tmp_path: Path, model: Model) -> None:
    """Every second step has a version, and every third is to be kept: the next one is."""
    models = made(tmp_path, model)
    for version in range(2, 13, 2):
        if models.is_due(version):
            publish(models, model, version)
    assert names(tmp_path / "models") == {"0-4", "0-6", "0-10", "0-12"}


def test_a_quantized_model_says_its_format(tmp_path: Path, model: Model) -> None:
    tensors = quantized_model.quantize_tensors(snapshot(model).tensors(), "fp8_ue8m0")
    models = KeptModels(tmp_path / "models", every=1, model_path=model.folder, quantization="fp8_ue8m0")
    models.publish(Snapshot.from_tensors(tensors), incarnation=0, policy_version=1)
    config = json.loads((tmp_path / "models" / "0-1" / "config.json").read_text())
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize(("first", "stays"), [(3, {"0-3"}), (4, {"0-3"}), (6, {"0-3", "1-6"})])
def test_a_learner_that_is_resumed_keeps_what_was_kept(
    tmp_path: Path, model: Model, first: int, stays: set[str]
) -> None:
    publish(made(tmp_path, model), model, 0, 1, 2, 3, 4)
    publish(made(tmp_path, model), model, first, incarnation=1)
    assert names(tmp_path / "models") == stays
