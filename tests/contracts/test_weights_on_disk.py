"""The contract of a channel over files when its files are removed or cut, and when the disk is full."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights import files
from asyncrl.weights.files import FilesChannel
from tests.harness.weights import in_parts, tensors, visible


def test_an_open_reader_keeps_its_bytes_when_the_version_is_collected(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(1.0), incarnation=0, policy_version=0)
    with safetensors.safe_open(files_channel.verify(weights) / "model.safetensors", "pt") as reader:
        for version in range(1, 4):
            files_channel.publish(tensors(2.0), incarnation=0, policy_version=version)
        assert not Path(weights.uri).exists()
        assert reader.get_tensor("b").tolist() == [1.0, 1.0, 1.0]


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from asyncrl.errors import BackendError, WeightsError
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel
directory, model_path, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
channel = FilesChannel(directory, keep=2, model_path=model_path)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    channel.publish(Snapshot.of([("a", torch.zeros(1 << 20))]), incarnation=0, policy_version=1)
except WeightsError as error:
    print(error)
print(sorted(path.name for path in directory.iterdir()))
"""


REMOVALS: dict[str, Callable[[Path], Any]] = {
    "its weights": lambda folder: (folder / "model.safetensors").unlink(),
    "its config": lambda folder: (folder / "config.json").unlink(),
    "all of it": shutil.rmtree,
    "all versions": lambda folder: shutil.rmtree(folder.parent),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("mine")),
    "another file of its name": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors").write_bytes(b"mine"),
    ),
}


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS.keys())
def test_files_of_the_newest_version_that_somebody_removes_are_written_again(
    files_channel: FilesChannel, removal: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    files_channel.publish(tensors(1.0), incarnation=0, policy_version=1)
    weights = files_channel.publish(tensors(2.0), incarnation=0, policy_version=2)
    assert files_channel.restore() is None
    for _ in range(2):
        names = {path.name for path in Path(weights.uri).iterdir()}
        removal(Path(weights.uri))
        assert files_channel.restore() == weights
        assert files_channel.restore() is None
        assert files_channel.verify(weights) == Path(weights.uri)
        assert {path.name for path in Path(weights.uri).iterdir()} == names
    assert len(caplog.messages) == 2
    assert "files of it were removed; written again" in caplog.text
    newer = files_channel.publish(tensors(3.0), incarnation=0, policy_version=3)
    assert (files_channel.verify(newer) / "config.json").exists()
    assert "0-3" in visible(files_channel)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_part_that_somebody_removes_is_written_again(files_channel: FilesChannel, name: str) -> None:
    given = [("b", torch.zeros(3)), ("a", torch.ones(2))]
    weights = files_channel.publish(in_parts(given), incarnation=0, policy_version=2)
    (Path(weights.uri) / name).unlink()
    assert files_channel.restore() == weights
    assert files_channel.verify(weights) == Path(weights.uri)


def test_weights_that_somebody_cut_cannot_be_written_again_and_that_is_said_once(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(), incarnation=0, policy_version=1)
    os.truncate(Path(weights.uri) / "model.safetensors", 30)
    with pytest.raises(WeightsError, match="removed or damaged; engines wait for the next version"):
        files_channel.restore()
    assert files_channel.restore() is None
    newer = files_channel.publish(tensors(), incarnation=0, policy_version=2)
    shutil.rmtree(newer.uri)
    assert files_channel.restore() == newer


def test_an_older_version_that_somebody_removes_stays_away(files_channel: FilesChannel) -> None:
    older = files_channel.publish(tensors(), incarnation=0, policy_version=1)
    files_channel.publish(tensors(), incarnation=0, policy_version=2)
    shutil.rmtree(older.uri)
    assert files_channel.restore() is None


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, model_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    directory = tmp_path / "weights"
    command = [sys.executable, "-c", FULL_DISK, str(directory), str(model_path), str(1 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, left = done.stdout.splitlines()
    # 4 x 2^20 bytes of data, 8 of length, 104 of header (a multiple of 8).
    assert error.startswith(f"{directory}: cannot write weights 0-1: File too large; it needs 4,194,416 bytes"), error
    assert left == "[]"


def test_no_space_left_says_how_much_there_is(files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.safetensors_file, "write", full)
    with pytest.raises(WeightsError, match=r"No space left on device; it needs [\d,]+ bytes, [\d,]+ are free") as said:
        files_channel.publish(tensors(), incarnation=0, policy_version=0)
    assert isinstance(said.value.__cause__, OSError)  # an error for which the learner waits instead of ending
    assert list(files_channel._directory.iterdir()) == []
