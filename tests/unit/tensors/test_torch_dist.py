"""Megatron's distributed checkpoints: read any rectangle written by any ranks, and never run code from a checkpoint."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.tensors import torch_dist
from asyncrl.tensors.torch_dist import Chunk, TorchDist

WHOLE = torch.arange(60.0).view(10, 6)


def cut(*rows: slice, columns: slice = slice(0, 6)) -> list[Chunk]:
    """Cut ``matrix`` from WHOLE."""
    starts = [(one.start, columns.start) for one in rows]
    return [
        Chunk(key="matrix", whole=(10, 6), start=start, data=WHOLE[one, columns])
        for one, start in zip(rows, starts, strict=True)
    ]


def written(folder: Path, *of_ranks: Sequence[Chunk]) -> Path:
    stored = []
    for rank, chunks in enumerate(of_ranks):
        stored += torch_dist.write_chunks(folder / torch_dist.file_name(rank), chunks)[0]
    torch_dist.complete(folder, stored)
    return folder


def test_reads_any_rectangle_across_rank_files(tmp_path: Path) -> None:
    left, right = slice(0, 4), slice(4, 6)
    first = [*cut(slice(0, 3), slice(7, 10), columns=left), *cut(slice(3, 7), columns=left)]
    bias = Chunk(key="bias", whole=(3,), start=(0,), data=torch.tensor([1, 2, 3], dtype=torch.bfloat16))
    found = TorchDist(written(tmp_path, first, [*cut(slice(0, 10), columns=right), bias]))
    assert set(found.keys()) == {"matrix", "bias"}
    assert torch.equal(found.read("matrix"), WHOLE)
    assert torch.equal(found.read("matrix", (2, 3), (6, 2)), WHOLE[2:8, 3:5])
    assert found.read("bias", (1,), (2,)).tolist() == [2, 3]
    assert found.dtype("bias") == torch.bfloat16


def test_a_checkpoint_that_lacks_a_part_is_not_completed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="matrix: 54 values were written, but the tensor has 60"):
        written(tmp_path, cut(slice(0, 9)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / ".metadata").unlink(), "is not a distributed checkpoint of Megatron"),
        (lambda folder: os.truncate(folder / ".metadata", 40), "cannot be read"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 90), r"__0_0.distcp: ends within matrix; was it copied"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "matrix cannot be read"),
    ],
)
def test_unreadable_checkpoint_is_one_line(tmp_path: Path, damage: object, said: str) -> None:
    folder = written(tmp_path, cut(slice(0, 10)))
    damage(folder)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=said) as caught:
        TorchDist(folder).read("matrix")
    assert str(folder) in str(caught.value)


def test_a_changed_bit_is_noticed_where_sums_are_checked(tmp_path: Path) -> None:
    folder = written(tmp_path, cut(slice(0, 10)))
    before = TorchDist(folder, checks_sums=True).read("matrix")
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(before.numpy().tobytes()[:16]) + 5] ^= 1
    file.write_bytes(data)
    assert not torch.equal(TorchDist(folder).read("matrix"), before)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: matrix is not as it was written"):
        TorchDist(folder, checks_sums=True).read("matrix")


def test_sizes_of_another_model_are_refused(tmp_path: Path) -> None:
    found = TorchDist(written(tmp_path, cut(slice(0, 10))))
    with pytest.raises(CheckpointError, match=r"matrix has the size \[10, 6\], the model needs \[12, 6\]"):
        found.read("matrix", (0, 0), (12, 6))
    with pytest.raises(CheckpointError, match="has no vector"):
        found.read("vector")


class Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._path}",)


def test_metadata_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="system, which does not belong in a checkpoint"):
        TorchDist(tmp_path)
    assert not (tmp_path / "ran").exists()
