"""A rank saves its state as it was when the save began; a checkpoint needs the parts of all ranks."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from asyncrl.backends.megatron.background_save import BackgroundSave, RankState, SavedModel, complete, random_states
from asyncrl.errors import CheckpointError
from asyncrl.tensors.torch_dist import Chunk


def state(folder: Path, rank: int, data: torch.Tensor) -> RankState:
    """One of two ranks, each with half of a matrix."""
    chunk = Chunk(key="matrix", whole=(4, 3), start=(2 * rank, 0), data=data)
    return RankState(folder=folder, chunks=[chunk, *random_states(rank)], steps={"matrix": 7.0})


def test_what_changes_later_is_not_in_it(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(4, 3)
    drawn = torch.get_rng_state()
    saves = [BackgroundSave([state(tmp_path, rank, half)], rank=rank) for rank, half in enumerate(matrix.split(2))]
    matrix += 100.0
    torch.rand(1)
    for save in saves:
        save.wait()
        assert save.is_done
        assert save.problem == ""
    files = complete(tmp_path, ranks=2)
    assert files == {file: sha256((tmp_path / file).read_bytes()).hexdigest() for file in files}
    found = SavedModel(tmp_path)
    assert torch.equal(found.read("matrix"), torch.arange(12.0).view(4, 3))
    assert found.steps == {"matrix": 7.0}
    found.restore_random_states(5)  # a rank beyond those that wrote the checkpoint
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_part_that_is_missing_makes_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = BackgroundSave([state(tmp_path / "one", 0, torch.zeros(2, 3))], rank=0)
    one.wait()
    with pytest.raises(CheckpointError, match="the ranks' parts"):
        complete(tmp_path / "one", ranks=2)
    lost = BackgroundSave([state(tmp_path / "nowhere" / "two", 0, torch.zeros(2, 3))], rank=0)
    lost.wait()
    assert "No such file or directory" in lost.problem


def test_a_rank_that_ends_leaves_what_it_has_not_written(tmp_path: Path) -> None:
    chunks = [Chunk(key=str(number), whole=(1,), start=(0,), data=torch.zeros(1)) for number in range(10_000)]
    save = BackgroundSave([RankState(folder=tmp_path, chunks=chunks)], rank=0)
    save.cancel()
    assert save.is_done
    assert save.problem
    assert not (tmp_path / "rank-00000.json").exists()


def test_a_checkpoint_of_another_backend_is_none_of_megatron_s(tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text(json.dumps({"format": 2, "ranks": 1, "tensor_parallel": 1}))
    with pytest.raises(CheckpointError, match="is not a distributed checkpoint"):
        SavedModel(tmp_path)
