"""Stores weight versions as model folders in a directory shared by the learner and every engine.

If several ranks of the learner each export a part of the model, each rank writes its own file; the index comes last.

Invariants (tests/contracts/test_weights.py, test_weights_on_disk.py):
  C1 a version's folder appears atomically: it is written under another name, synced, and renamed once it is complete.
  C2 the newest version is never removed. Of the others the newest ``keep`` - 1 stay, and retained ones.
  C3 a reader gets exactly the bytes that were published, or WeightsError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors.torch
import torch

from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.codec import decode, encode
from asyncrl.tensors import adapter_names, quantized_model, safetensors_file, weight_files
from asyncrl.tensors.adapter_names import CONFIG_FILE
from asyncrl.tensors.snapshot import HostBucket, PartWorker, Snapshot
from asyncrl.tensors.weight_files import WeightFile
from asyncrl.weights.adapter import ChannelAdapter

_TEMPORARY: Final = ".tmp-"
_COMPANIONS: Final = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files that accompany a model's weights: config, generation config, tokenizer, chat template."""
_STAGING_BYTES: Final = 512 * 2**20
"""Bytes copied from the device at once, and pinned on the host."""


class FilesChannel(ChannelAdapter):
    """Folders DIRECTORY/INCARNATION-POLICY_VERSION. One writer and any number of readers, in any process."""

    takes = frozenset({"adapters", "fp8"})
    takes_parts = True

    def __init__(self, directory: Path, *, keep: int, model_path: Path) -> None:
        """``keep``: versions to keep. ``model_path``: folder whose config and tokenizer are added to every version."""
        self._directory = directory.absolute()
        self._keep = max(keep, 1)
        self._model_path = model_path
        self._retained: set[tuple[int, int]] = set()
        self._writer = PartWriter()
        self._by_others: list[Path] = []  # files that other ranks are writing now
        self._written_by_others = 0
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        """See WeightChannel. Other ranks' progress is the length of their files."""
        return self._writer.progress + self._written_by_others + sum(map(_length, tuple(self._by_others)))

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Write one version and remove old ones. Raises WeightsError if it cannot be written (disk full)."""
        name = f"{incarnation}-{policy_version}"
        num_bytes = snapshot.num_bytes
        folder, temporary = self._directory / name, self._directory / f"{_TEMPORARY}{name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
            if adapter_names.are_adapters(snapshot.entries):
                snapshot = _collect_adapters(snapshot)  # adapters are small, and PEFT reads one file
            adapters = adapter_names.config(snapshot.entries, base=self._model_path)
            whole = weight_files.WEIGHTS_FILE if adapters is None else adapter_names.ADAPTER_FILE
            files = self._write_parts(temporary, snapshot, whole=whole)
            add_companions(temporary, self._model_path)
            if adapters is not None:
                (temporary / CONFIG_FILE).write_text(json.dumps(adapters, indent=1))
            if quantized_model.find_format(name for one in files for name in one.names):
                quantized_model.describe_quantization(temporary / "config.json")
            num_bytes = sum(one.num_bytes for one in files)
            sha256 = _complete(temporary, files)
            if os.path.lexists(folder):  # published by an earlier process that crashed before its checkpoint
                self._discard(folder)
            temporary.rename(folder)
            _sync(self._directory)
        except WeightsError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._cannot_write(name, num_bytes, error.strerror, error.errno) from error
        self._collect(newest=(incarnation, policy_version))
        self.published_bytes = num_bytes
        return WeightVersion(
            incarnation=incarnation, policy_version=policy_version, uri=str(folder), sha256=sha256, num_bytes=num_bytes
        )

    def retain(self, weights: WeightVersion) -> None:
        self._retained.add(weights.version)

    def release(self, weights: WeightVersion) -> None:
        self._retained.discard(weights.version)

    def _write_parts(self, temporary: Path, snapshot: Snapshot, *, whole: str) -> list[WeightFile]:
        """Have every rank write its part, concurrently. Raises OSError, WeightsError."""
        count = 1 + len(snapshot.others)
        paths = [temporary / weight_files.file_name(number, count, whole=whole) for number in range(count)]
        self._by_others = paths[1:]
        try:
            commands = [encode(WriteCommand(file=str(path))) for path in paths]
            answers = [decode(one, Written) for one in snapshot.run_on_parts(self._writer, commands)]
            self._written_by_others += sum(map(_length, paths[1:]))
        finally:
            self._by_others = []
        for path, answer in zip(paths, answers, strict=True):
            if answer.problem:
                needed = sum(one.num_bytes for one in answers)
                cause = OSError(answer.error, answer.problem)  # for which the learner waits and retries
                name = temporary.name.removeprefix(_TEMPORARY)
                raise self._cannot_write(name, needed, answer.problem, answer.error) from cause
            if _length(path) != answer.num_bytes:
                raise WeightsError(
                    f"{path}: has {_length(path)} bytes here, and another rank of the learner wrote "
                    f"{answer.num_bytes:,}; set weights.directory to a folder that all of its machines share"
                )
        return [
            WeightFile(file=path.name, sha256=answer.sha256, num_bytes=answer.num_bytes, names=answer.names)
            for path, answer in zip(paths, answers, strict=True)
        ]

    def _collect(self, *, newest: tuple[int, int]) -> None:
        versions = sorted(version for path in self._directory.iterdir() if (version := _version(path)) is not None)
        older = [version for version in versions if version < newest]
        newer = [version for version in versions if version > newest]  # from an earlier run in this directory
        for incarnation, policy_version in newer + older[: max(0, len(older) - (self._keep - 1))]:
            if (incarnation, policy_version) in self._retained:
                continue
            self._discard(self._directory / f"{incarnation}-{policy_version}")

    def _discard(self, folder: Path) -> None:
        """Rename, then delete, so that a reader finds the version complete or not at all. Ignores a missing folder."""
        hidden = folder.with_name(f"{_TEMPORARY}old-{folder.name}")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(hidden)
            _remove(hidden)

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left."""
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            _remove(path)

    def _cannot_write(self, name: str, num_bytes: int, problem: str | None, number: int | None) -> WeightsError:
        free = ""
        if number in (errno.ENOSPC, errno.EDQUOT):
            there = shutil.disk_usage(self._directory).free
            free = f", {there:,} are free; make room, lower weights.keep, or set weights.directory"
        return WeightsError(
            f"{self._directory}: cannot write weights {name}: {problem}; it needs {num_bytes:,} bytes{free}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommand:
    """Tells a rank to write its part.  file: full path"""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of writing one part.  problem, error: why it failed, as text and as errno"""

    sha256: str = ""
    num_bytes: int = 0
    names: tuple[str, ...] = ()
    problem: str = ""
    error: int = 0


class PartWriter(PartWorker):
    """Writes a part to a safetensors file, synced to disk."""

    def __init__(self) -> None:
        self.progress = 0
        self._stream: torch.cuda.Stream | None = None
        """Beside other work of the device. It stays: torch keeps freed memory for the stream that used it."""

    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        header = safetensors_file.header(snapshot.entries)
        num_bytes = len(header) + snapshot.num_bytes
        try:
            with Path(decode(command, WriteCommand).file).open("wb") as stream:
                sha256 = safetensors_file.write(stream, itertools.chain([header], self._blocks(snapshot)))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            return encode(Written(num_bytes=num_bytes, problem=error.strerror or str(error), error=error.errno or 0))
        names = tuple(entry.name for entry in snapshot.entries)
        return encode(Written(sha256=sha256, num_bytes=num_bytes, names=names))

    def _blocks(self, snapshot: Snapshot) -> Iterator[memoryview]:
        """Yield the part's bytes, each valid until the next. Kept buckets are filled one after the other."""
        buckets = snapshot.cut(_STAGING_BYTES).buckets
        on_device = [bucket for bucket in buckets if not isinstance(bucket, HostBucket)]
        largest = max((bucket.num_bytes for bucket in on_device if bucket.device.type == "cuda"), default=0)
        staging = torch.empty(largest, dtype=torch.uint8, pin_memory=largest > 0)  # torch keeps pinned memory for reuse
        if largest and self._stream is None:
            self._stream = torch.cuda.Stream(snapshot.device)  # type: ignore[no-untyped-call]
        block = None
        for bucket in buckets:
            if isinstance(bucket, HostBucket):
                data = bucket.on_host().data
            else:
                with torch.cuda.stream(self._stream):
                    if bucket.is_kept and block is None:
                        size = max(one.num_bytes for one in on_device if one.is_kept)
                        block = torch.empty(size, dtype=torch.uint8, device=bucket.device)
                    data = bucket.filled(block).data
                    if self._stream is not None:
                        data = staging[: data.numel()].copy_(data, non_blocking=True)
                        self._stream.synchronize()
            yield memoryview(data.numpy())  # type: ignore[arg-type]
            self.progress += bucket.num_bytes


class PartReader(PartWorker):
    """Returns a part as the bytes of a safetensors file. For small parts."""

    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        data: bytes = safetensors.torch.save({name: tensor.cpu() for name, tensor in snapshot.tensors()})
        return data


def _collect_adapters(snapshot: Snapshot) -> Snapshot:
    """Collect the adapters of all ranks in this process."""
    answers = snapshot.run_on_parts(PartReader(), [b""] * (1 + len(snapshot.others)))
    return Snapshot.from_tensors(item for answer in answers for item in sorted(safetensors.torch.load(answer).items()))


def _complete(folder: Path, files: Sequence[WeightFile]) -> str:
    """Write the index if there are several files, and sync the folder. Return the checksum to announce."""
    sha256 = files[0].sha256
    if len(files) > 1:
        index = weight_files.make_index(files)
        sha256 = hashlib.sha256(index).hexdigest()
        with (folder / weight_files.INDEX_FILE).open("wb") as stream:
            stream.write(index)
            stream.flush()
            os.fsync(stream.fileno())
    _sync(folder)
    return sha256


def _length(path: Path) -> int:
    """Length of the file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def add_companions(folder: Path, model_path: Path) -> None:
    """Copy config, tokenizer and chat template, but no weights, from the model's folder."""
    for file in sorted(model_path.iterdir()):
        if file.suffix in _COMPANIONS and not file.name.endswith(".index.json") and file.is_file():
            shutil.copyfile(file, folder / file.name)


def _version(path: Path) -> tuple[int, int] | None:
    incarnation, dash, policy_version = path.name.partition("-")
    return (
        (int(incarnation), int(policy_version)) if dash and incarnation.isdigit() and policy_version.isdigit() else None
    )


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _sync(folder: Path) -> None:
    """Sync the folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
