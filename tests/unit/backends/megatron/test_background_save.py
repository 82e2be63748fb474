"""A rank saves its state as it was when the save began; a checkpoint needs the parts of all ranks."""

from __future__ import annotations

import dataclasses
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.backends.megatron.background_save import BackgroundSave, RankState, SavedModel, complete, random_states
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.errors import CheckpointError
from asyncrl.tensors.torch_dist import Chunk
from tests.harness.backends import SETTINGS, distance, started, tiny_model, weights


def state(folder: Path, rank: int, data: torch.Tensor) -> RankState:
    """One of two ranks, each with half of a matrix."""
    chunk = Chunk(key="matrix", whole=(4, 3), start=(2 * rank, 0), data=data)
    return RankState(folder=folder, chunks=[chunk, *random_states(rank)], steps={"matrix": 7.0})


def test_save_keeps_the_state_of_its_beginning(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(4, 3)
    drawn = torch.get_rng_state()
    saves = [BackgroundSave([state(tmp_path, rank, half)], rank=rank) for rank, half in enumerate(matrix.split(2))]
    matrix += 100.0
    torch.rand(1)
    parts = [save.result(wait=True) for save in saves]
    assert [(part.is_done, part.problem) for part in parts] == [(True, "")] * 2
    files = complete(tmp_path, [part.files[0] for part in parts])
    assert files == {file: sha256((tmp_path / file).read_bytes()).hexdigest() for file in files}
    found = SavedModel(tmp_path)
    assert torch.equal(found.read("matrix"), torch.arange(12.0).view(4, 3))
    assert found.steps == {"matrix": 7.0}
    found.restore_random_states(5)  # a rank beyond those that wrote the checkpoint
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_missing_part_makes_no_checkpoint(tmp_path: Path) -> None:
    one = BackgroundSave([state(tmp_path, 0, torch.zeros(2, 3))], rank=0).result(wait=True)
    with pytest.raises(CheckpointError, match="matrix: 6 values were written, but the tensor has 12"):
        complete(tmp_path, one.files)
    lost = BackgroundSave([state(tmp_path / "nowhere" / "two", 0, torch.zeros(2, 3))], rank=0).result(wait=True)
    assert "No such file or directory" in lost.problem


def test_checkpoint_of_the_reference_backend_is_refused(tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text(json.dumps({"format": "reference"}))
    with pytest.raises(CheckpointError, match="is not a distributed checkpoint"):
        SavedModel(tmp_path)


def adapters(rank: int, *modules: str) -> dict[str, Any]:
    lora = Lora(rank=rank, alpha=8.0, modules=modules, is_merged=True)
    return {"optimizer": dataclasses.replace(SETTINGS, lora=lora)}


@pytest.mark.parametrize(
    ("larger", "settings", "smaller", "of_it", "problem"),
    [
        ({"num_layers": 4}, {}, {}, {}, r"has decoder\.layers\.2\..* \(16 such weights\)"),
        ({"hidden_size": 128}, {}, {}, {}, r"has the size \[50, 128\], the model needs \[50, 64\]"),
        ({}, adapters(8, "o_proj"), {}, adapters(4, "o_proj"), r"has the size \[1, 8, 64\], the model needs \[1, 4,"),
        ({}, adapters(4, "o_proj", "down_proj"), {}, adapters(4, "o_proj"), r"\.mlp\.linear_fc2\.weight_adapter\.down"),
    ],
    ids=["layers", "hidden size", "rank of adapters", "modules with adapters"],
)
def test_a_checkpoint_of_a_larger_model_is_not_cut_to_fit(
    tmp_path: Path,
    larger: dict[str, Any],
    settings: dict[str, Any],
    smaller: dict[str, Any],
    of_it: dict[str, Any],
    problem: str,
) -> None:
    with started("megatron-1", tiny_model(tmp_path / "larger", **larger), **settings) as backend:
        backend.save(tmp_path / "saved")
    with started("megatron-1", tiny_model(tmp_path / "larger", **smaller), **of_it) as backend:
        before = weights(backend)
        with pytest.raises(CheckpointError, match=problem + ".*is it a checkpoint of another model"):
            backend.restore(tmp_path / "saved")
        assert distance(weights(backend), before) == 0.0
