"""The contract of a channel over files when its files are removed, and when the disk is full."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from asyncrl.errors import WeightsError
from asyncrl.tensors import safetensors_file
from asyncrl.weights.files import FilesChannel
from tests.harness.weights import tensors


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
    channel.publish(Snapshot.from_tensors([("a", torch.zeros(1 << 20))]), incarnation=0, policy_version=1)
except WeightsError as error:
    print(error)
print(sorted(path.name for path in directory.iterdir()))
"""


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

    monkeypatch.setattr(safetensors_file, "write", full)
    with pytest.raises(WeightsError, match=r"No space left on device; it needs [\d,]+ bytes, [\d,]+ are free") as said:
        files_channel.publish(tensors(), incarnation=0, policy_version=0)
    assert isinstance(said.value.__cause__, OSError)  # an error for which the learner waits instead of ending
    assert list(files_channel._directory.iterdir()) == []
