"""A rank saves its state as it was when the save began; a checkpoint needs the parts of all ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
import weakref
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.backends.megatron.background_save import BackgroundSave, RankState, SavedModel, complete, random_states
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.errors import CheckpointError
from asyncrl.tensors.torch_dist import Chunk, file_name
from tests.harness.backends import SETTINGS, distance, sequences, shares, started, tiny_model, weights


def state(folder: Path, rank: int, data: torch.Tensor) -> RankState:
    """One of two ranks, each with half of a matrix."""
    chunk = Chunk(key="matrix", whole=(4, 3), start=(2 * rank, 0), data=data)
    return RankState(folder=folder, chunks=[chunk, *random_states(rank)], steps={"matrix": 7.0})


def test_save_keeps_the_state_of_its_beginning(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(4, 3)
    drawn = torch.get_rng_state()
    saves = [
        BackgroundSave([state(tmp_path, rank, half)], rank=rank, room=2**20)
        for rank, half in enumerate(matrix.split(2))
    ]
    for save in saves:
        save.wait_until_copied()
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
    one = BackgroundSave([state(tmp_path, 0, torch.zeros(2, 3))], rank=0, room=2**20).result(wait=True)
    with pytest.raises(CheckpointError, match="matrix: 6 values were written, but the tensor has 12"):
        complete(tmp_path, one.files)
    lost = BackgroundSave([state(tmp_path / "nowhere" / "two", 0, torch.zeros(2, 3))], rank=0, room=2**20).result(
        wait=True
    )
    assert "No such file or directory" in lost.problem


def test_a_full_disk_is_told_apart_from_other_problems(tmp_path: Path) -> None:
    """The learner waits for a disk; another problem ends it."""
    (tmp_path / file_name(0)).symlink_to("/dev/full")
    full = BackgroundSave([state(tmp_path, 0, torch.zeros(2, 3))], rank=0, room=2**20).result(wait=True)
    assert (full.is_done, full.errno) == (True, errno.ENOSPC)


class Counted(BackgroundSave):
    """Counts the copies of chunks that are alive when one is made. A file is written only as the test lets it."""

    def __init__(self, states: list[RankState], *, room: int) -> None:
        self.copies: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        self.writing, self.may_write = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__(states, rank=0, room=room)

    def _begin_copy(self, chunk: Chunk) -> Chunk:
        made = super()._begin_copy(chunk)
        self.copies.append(weakref.ref(made.data))
        self.most = max(self.most, sum(copy() is not None for copy in self.copies))
        return made

    def _copied(self, chunk: Chunk) -> Chunk:
        self.writing.release()
        assert self.may_write.acquire(timeout=60)
        return super()._copied(chunk)


@pytest.mark.parametrize(("room", "most"), [(0, 2), (2, 3), (4, 5), (10, 10)])
def test_no_more_is_copied_than_there_is_room_for_and_a_change_waits_for_the_rest(
    room: int, most: int, tmp_path: Path
) -> None:
    """Of ten chunks of two models. Beside the room there is the chunk that is being written."""
    whole = torch.arange(1000.0).view(10, 100)

    def states(of: Path, data: torch.Tensor) -> list[RankState]:
        of.mkdir()
        return [
            RankState(
                folder=of / name,
                chunks=[Chunk(key="key", whole=(5, 100), start=(row, 0), data=part[row : row + 1]) for row in range(5)],
            )
            for name, part in zip(("one", "two"), data.split(5), strict=True)
        ]

    expected = BackgroundSave(states(tmp_path / "at once", whole.clone()), rank=0, room=2**20).result(wait=True)
    save = Counted(states(tmp_path / "in pieces", whole), room=room * whole[0].nbytes)
    for number in range(10):
        assert save.writing.acquire(timeout=60)
        assert len(save.copies) == min(10, max(room, 1) + number)
        if len(save.copies) == 10:
            save.wait_until_copied()
            whole.zero_()  # the next update
        save.may_write.release()
    assert save.result(wait=True) == expected
    assert save.most == most


def test_what_ends_a_save_lets_changes_go_on(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere" / "two"):
        save = Counted([state(folder, 0, torch.zeros(2, 3))], room=0)
        ending = threading.Thread(target=save.cancel)
        ending.start()
        assert save._is_cancelled.wait(60)
        save.may_write.release(2)
        ending.join()
        save.wait_until_copied()
        assert save.result(wait=True).problem


def test_an_update_waits_until_what_is_saved_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updating, wait, begin_copy = threading.Event(), BackgroundSave.wait_until_copied, BackgroundSave._begin_copy

    def begin_late(save: BackgroundSave, chunk: Chunk) -> Chunk:
        assert updating.wait(60)
        return begin_copy(save, chunk)

    def wait_from_now_on(save: BackgroundSave) -> None:
        updating.set()
        wait(save)

    monkeypatch.setattr(BackgroundSave, "_begin_copy", begin_late)
    monkeypatch.setattr(BackgroundSave, "wait_until_copied", wait_from_now_on)
    with started("megatron-1", tiny_model(tmp_path / "model")) as backend:
        beside: Any = backend
        before = weights(backend)
        beside.begin_save(tmp_path / "saved")
        backend.step(shares("megatron-1", sequences(0)), learning_rate=1e-2)
        beside.finish_save(tmp_path / "saved", wait=True)
        assert distance(weights(backend), before) > 0.0
        backend.restore(tmp_path / "saved")
        assert distance(weights(backend), before) == 0.0


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
