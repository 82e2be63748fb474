"""A damaged checkpoint is detected before use and kept aside; the previous one is used, and nothing else is touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl.actors.learner import checkpoint, manifest
from asyncrl.errors import CheckpointDamaged, CheckpointError
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.version import SCHEMA
from tests.harness.checkpoints import write_checkpoint


def saved(step: int, *, incarnation: int = 0) -> LearnerState:
    """A state with two groups per step and two outstanding groups."""
    done = 2 * step
    return LearnerState(
        incarnation=incarnation,
        step=step,
        policy_version=step,
        groups={"watermark": done, "beyond": []},
        consumed={"watermark": done + 1, "beyond": []},
        prompts=PromptState(next_group_id=done + 2, position=done + 2, outstanding={done: done, done + 1: done + 1}),
        groups_trained=done,
        resume_points={incarnation: 1} if incarnation else {},
    )


def save_backend(folder: Path) -> None:
    safetensors.torch.save_file({"weight": torch.arange(1000.0)}, folder / "state.safetensors")
    torch.save({"momentum": torch.arange(1000.0)}, folder / "optimizer.pt")
    (folder / "backend.json").write_text('{"ranks": 1}')


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 5, 10 and 15."""
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, saved(step), save_backend=save_backend, keep=3)
    return tmp_path


def resumed(directory: Path) -> tuple[int, list[str]]:
    """Return the step from which a learner resumes, and its messages."""
    said: list[str] = []
    found = checkpoint.resume(directory, say=said.append)
    assert not any("\n" in line for line in said)
    return (-1 if found is None else found[0].step), said


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def list_again(folder: Path) -> None:
    """Write the manifest for the files as they are now."""
    (folder / manifest.FILE).unlink()
    manifest.write(folder)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": truncate,
    "a bit flipped": flip,
    "emptied": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "a folder": replace_by_folder,
}
FILES = ["learner.json", "backend/state.safetensors", "backend/optimizer.pt", "backend/backend.json"]


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_is_taken(
    directory: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](directory / "step-00000015" / name)
    step, said = resumed(directory)
    assert step == 10
    assert len(said) == 1
    if (name, damage) != ("manifest.json", "a bit flipped"):  # otherwise another file seems to have wrong bytes
        assert f"step-00000015: is damaged: {name} " in said[0]
    assert "step-00000015: is damaged: " in said[0]
    assert "kept as damaged-step-00000015; trying step-00000010" in said[0]
    assert (directory / "damaged-step-00000015").is_dir() and not (directory / "step-00000015").exists()
    assert resumed(directory) == (10, [])  # reported once


DEEP = b"[" * 100_000 + b"]" * 100_000
ODD_VALUES = {
    "deep": DEEP,
    "huge": b"1e999",
    "below": b"-1e999",
    "none": b"NaN",
    "digits": b"9" * 5000,
    "long": b'"' + b"x" * 5000 + b'"',
    "half": b'"\\ud800"',
}


@pytest.mark.parametrize("name", ["manifest.json", "learner.json"])
@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_any_value_overwritten_is_damage(directory: Path, value: bytes, name: str) -> None:
    """Unreadable or partly readable data at each value of the manifest, or of a learner.json that it lists."""
    path = directory / "step-00000015" / name
    pieces = path.read_bytes().split(b": ")
    for at in range(1, len(pieces)):
        rest = pieces[at]
        end = min(rest.find(mark) for mark in (b",", b"}", b"\n") if mark in rest)
        path.write_bytes(b": ".join([*pieces[:at], value + rest[end:], *pieces[at + 1 :]]))
        if name == "learner.json":
            list_again(path.parent)
        with contextlib.suppress(CheckpointDamaged):
            checkpoint.read(directory / "step-00000015", whole=True)
    path.write_bytes(DEEP)
    assert resumed(directory)[0] == 10


def test_when_several_are_damaged_the_newest_whole_one_is_taken(directory: Path) -> None:
    shutil.rmtree(directory / "step-00000015" / "backend")
    flip(directory / "step-00000010" / "learner.json")
    step, said = resumed(directory)
    assert (step, len(said)) == (5, 2)
    assert checkpoint.list_damaged(directory) == ["damaged-step-00000010", "damaged-step-00000015"]
    shutil.rmtree(directory / "step-00000005" / "backend")
    step, said = resumed(directory)
    assert (step, len(said)) == (-1, 1)
    assert said[0].endswith("there is no checkpoint before it")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("is_hashed", [True, False], ids=["hashed", "read"])
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    directory: Path, number: int, is_hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user, or a network disk that fails briefly: nothing is renamed, and no older checkpoint is used."""

    def fail(path: Path) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    if is_hashed:
        monkeypatch.setattr(manifest, "_hash_one", fail)
    else:
        monkeypatch.setattr(manifest, "find_damage", lambda folder, **_: "")
        monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(OSError, match="step-00000015") as raised:
        resumed(directory)
    assert raised.value.errno == number
    assert checkpoint.list_damaged(directory) == []
    assert len(checkpoint.list_complete(directory)) == 3


def test_what_is_damaged_is_never_deleted_nor_replaced(directory: Path) -> None:
    flip(directory / "step-00000015" / "learner.json")
    (directory / "damaged-step-00000015").mkdir()
    resumed(directory)
    assert (directory / "damaged-step-00000015-1" / "learner.json").exists()
    for step in (20, 25, 30, 35):
        write_checkpoint(directory, saved(step, incarnation=1), save_backend=save_backend, keep=2)
    assert [folder.name for folder in checkpoint.list_complete(directory)] == [
        "step-00000030-epoch-1",
        "step-00000035-epoch-1",
    ]
    assert (directory / "damaged-step-00000015-1" / "learner.json").exists()


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused_and_is_no_damage(directory: Path, schema: int) -> None:
    path = directory / "step-00000015" / "learner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    list_again(path.parent)
    with pytest.raises(CheckpointError, match=f"has schema {schema}, and this .* reads schema {SCHEMA}"):
        resumed(directory)
    assert path.exists()
