"""The contract of a channel over files when its files are removed, and when the disk is full."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from asyncrl.errors import WeightsError
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.host_copies import HostCopies
from asyncrl.tensors.snapshot import Kept, Snapshot
from asyncrl.weights import files
from asyncrl.weights.files import FilesChannel
from tests.harness.weights import tensors


def test_an_open_reader_keeps_its_bytes_when_the_version_is_collected(files_channel: FilesChannel) -> None:
    weights = files_channel.publish(tensors(1.0), incarnation=0, policy_version=0)
    with safetensors.safe_open(files_channel.verify(weights) / "model.safetensors", "pt") as reader:
        for version in range(1, 4):
            files_channel.publish(tensors(2.0), incarnation=0, policy_version=version)
        assert not Path(weights.uri).exists()
        assert reader.get_tensor("b").tolist() == [1.0, 1.0, 1.0]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, model_path: Path) -> None:
    """The disk is a limit of 1 MiB on each file that this process writes."""
    directory = tmp_path / "weights"
    channel = FilesChannel(directory, keep=2, model_path=model_path)
    snapshot = Snapshot.from_tensors([("a", torch.zeros(1 << 20))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(WeightsError) as said:
            channel.publish(snapshot, incarnation=0, policy_version=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # 4 x 2^20 bytes of data, 8 of length, 104 of header (a multiple of 8).
    wanted = f"{directory}: cannot write weights 0-1: File too large; it needs 4,194,416 bytes"
    assert str(said.value).startswith(wanted) and "\n" not in str(said.value)
    assert list(directory.iterdir()) == []


def test_no_space_left_says_how_much_there_is(files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write", full)
    with pytest.raises(WeightsError, match=r"No space left on device; it needs [\d,]+ bytes, [\d,]+ are free") as said:
        files_channel.publish(tensors(), incarnation=0, policy_version=0)
    assert isinstance(said.value.__cause__, OSError)  # an error for which the learner waits instead of ending
    assert list(files_channel._directory.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("CUDA out of memory")])
def test_a_version_of_several_files_that_fails_halfway_leaves_none(
    files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write, begun = safetensors_file.write, list[object]()

    def fails_the_second(stream: BinaryIO, blocks: Iterable[bytes | memoryview]) -> str:
        begun.append(stream)
        if len(begun) == 2:
            raise error
        return write(stream, blocks)

    monkeypatch.setattr(files, "_FILE_BYTES", 1)
    monkeypatch.setattr(safetensors_file, "write", fails_the_second)
    with pytest.raises((WeightsError, RuntimeError), match=r"No space left|out of memory") as said:
        files_channel.publish(tensors(), incarnation=0, policy_version=0)
    assert len(begun) >= 2 and "\n" not in str(said.value)
    assert list(files_channel._directory.iterdir()) == []


def test_the_progress_of_a_lone_rank_is_read_while_the_disk_hangs(
    files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop reads it, to say that a write hangs."""
    write, seen = safetensors_file.write, list[int]()

    def hangs(*_: object, **__: object) -> NoReturn:
        raise AssertionError("asks the disk")

    def written(stream: BinaryIO, blocks: Iterable[bytes | memoryview]) -> str:
        found = write(stream, blocks)
        with monkeypatch.context() as now:
            now.setattr(Path, "stat", hangs)
            now.setattr(Path, "glob", hangs)
            seen.append(files_channel.progress)
        return found

    monkeypatch.setattr(safetensors_file, "write", written)
    weights = files_channel.publish(tensors(), incarnation=0, policy_version=0)
    assert seen == [weights.num_bytes] == [files_channel.progress]


def test_progress_never_falls_when_the_folder_of_several_ranks_gets_its_name(
    files_channel: FilesChannel, tmp_path: Path
) -> None:
    folder = tmp_path / ".tmp-0-1"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(100))
    files_channel._written_to = folder
    assert files_channel.progress == 100
    folder.rename(tmp_path / "0-1")  # while another thread still has the old name
    assert files_channel.progress == 100


def later(tensor: torch.Tensor) -> Kept:
    """As exported to the host: the next update changes it."""
    return Kept(shape=tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device, source=tensor, until_update=True)


def test_files_are_the_same_to_the_byte_whichever_buckets_their_tensors_come_in(
    files_channel: FilesChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta is of equal places. Copies on the host have other buckets than those on the device, and another order
    where some are gathered from tensor-parallel ranks first."""
    monkeypatch.setattr(files, "_FILE_BYTES", 1_000)
    given = [(f"w{number:02}", torch.full((10 + number,), float(number))) for number in range(30)]
    gathered = given[::3]
    on_host = [one if one in gathered else (one[0], later(one[1])) for one in given]
    copies = HostCopies(torch.device("cpu"))
    found_files = list[dict[str, bytes]]()
    exports = [Snapshot.from_tensors(given, bucket_bytes=num_bytes) for num_bytes in (500, 700, 10_000)]
    exports.append(Snapshot.from_tensors(on_host, bucket_bytes=600, to_host=copies.copy))
    for version, exported in enumerate(exports, 1):
        folder = Path(files_channel.publish(exported, incarnation=0, policy_version=version).uri)
        found_files.append({path.name: path.read_bytes() for path in folder.glob("*.safetensors")})
        found = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
        assert all(torch.equal(found[name], one) for name, one in given)
    assert len(found_files[0]) > 3 and found_files[1:] == found_files[:-1]
