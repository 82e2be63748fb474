"""Stores weight versions as model folders in a directory shared by the learner and every engine.

If several ranks of the learner each export a part of the model, each rank writes its own files; the index comes last.
A part of more than 4 GiB becomes several files, written beside each other: one core hashes only some 1.25 GB a second.

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
import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, cast

import safetensors.torch
import torch

from asyncrl.bus.port import Bus
from asyncrl.config.adapter import RunConfig
from asyncrl.durable_files import sync, write_whole
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.codec import decode, encode
from asyncrl.tensors import adapter_names, quantized_model, safetensors_file, weight_files
from asyncrl.tensors.adapter_names import CONFIG_FILE
from asyncrl.tensors.snapshot import AnyBucket, HostBucket, PartWorker, Snapshot
from asyncrl.tensors.weight_files import WeightFile
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.port import WeightChannel

_TEMPORARY: Final = ".tmp-"
_COMPANIONS: Final = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files that accompany a model's weights: config, generation config, tokenizer, chat template."""
_FILE_BYTES: Final = 4 * 2**30
"""Of one file, unless a tensor is larger. Files of a part are written by up to _WRITERS threads."""
_WRITERS: Final = 4
"""Each has one tensor on its way from the device."""


class FilesChannel(ChannelAdapter):
    """Folders DIRECTORY/INCARNATION-POLICY_VERSION. One writer and any number of readers, in any process."""

    takes = frozenset({"adapters", *quantized_model.FORMATS})
    takes_parts = True

    @classmethod
    def build(cls, run: RunConfig, *, bus: Bus) -> WeightChannel:
        channel = super().build(run, bus=bus)
        cast(FilesChannel, channel)._quantization = run.weights.quantization  # a subclass has a constructor of its own
        return channel

    def __init__(self, directory: Path, *, keep: int, model_path: Path, quantization: str = "") -> None:
        """
        keep          versions to keep
        model_path    folder whose config and tokenizer are added to every version
        quantization  weights.quantization
        """
        self._quantization = quantization
        self._directory = directory.absolute()
        self._keep = max(keep, 1)
        self._model_path = model_path
        self._retained: set[tuple[int, int]] = set()
        self._writer = PartWriter()
        self._written_to: Path | None = None  # the folder that several ranks are writing to now
        self._written_before = 0
        self._seen = 0
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        """See WeightChannel. Only that of other ranks is read from the disk, which may hang: as the length of files."""
        self._seen = max(self._seen, self._written_before + _bytes_in(self._written_to))  # the folder may just be gone
        return self._writer.progress + self._seen

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
            elif quantized_model.are_quantized(name for one in files for name in one.names):
                about = quantized_model.config(self._quantization)
                weight_files.describe(temporary, {"quantization_config": about})
            elif (temporary / "config.json").exists():  # the folder at model.path may have another dtype
                weight_files.describe(temporary, {"dtype": _dtype_of(snapshot)})
            num_bytes = sum(one.num_bytes for one in files)
            sha256 = _complete(temporary, files)
            if os.path.lexists(folder):  # published by an earlier process that crashed before its checkpoint
                self._discard(folder)
            temporary.rename(folder)
            sync(self._directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._cannot_write(name, num_bytes, error.strerror, error.errno) from error
        except BaseException:  # WeightsError, or no memory for blocks
            shutil.rmtree(temporary, ignore_errors=True)
            raise
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
        names = [weight_files.file_name(number, count, whole=whole) for number in range(count)]
        self._written_to = temporary if snapshot.others else None
        try:
            commands = [encode(WriteCommand(file=str(temporary / name))) for name in names]
            answers = [decode(one, Written) for one in snapshot.run_on_parts(self._writer, commands)]
        finally:
            written = _bytes_in(self._written_to)
            self._written_to, self._written_before = None, self._written_before + written
        for answer in answers:
            if answer.problem:
                needed = sum(one.num_bytes for one in answers)
                cause = OSError(answer.error, answer.problem)  # for which the learner waits and retries
                name = temporary.name.removeprefix(_TEMPORARY)
                raise self._cannot_write(name, needed, answer.problem, answer.error) from cause
        files = [file for answer in answers for file in answer.files]
        for file in files:
            if (there := _length(temporary / file.file)) != file.num_bytes:
                raise WeightsError(
                    f"{temporary / file.file}: has {there} bytes here, and another rank of the learner wrote "
                    f"{file.num_bytes:,}; set weights.directory to a folder that all of its machines share"
                )
        return files

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
    """Tells a rank to write its part.  file: full path, from which those of several files are made"""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of writing one part.  num_bytes: of all files; problem, error: why it failed, as text and as errno"""

    files: tuple[WeightFile, ...] = ()
    num_bytes: int = 0
    problem: str = ""
    error: int = 0


class PartWriter(PartWorker):
    """Writes a part to safetensors files, synced to disk."""

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        """Beside other work of the device. They stay: torch keeps freed memory for the stream that used it."""
        self._counting = threading.Lock()
        self.progress = 0
        """Bytes written. Rises while a part is written."""

    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        path = Path(decode(command, WriteCommand).file)
        parts = list(_split(snapshot))
        names = weight_files.names_of_part(path.name, len(parts))
        streams = self._streams_for(snapshot)

        def write(part: Snapshot, name: str) -> WeightFile:
            stream = streams.get()
            try:
                return self._write_file(path.with_name(name), part, stream)
            finally:
                streams.put(stream)

        try:
            with ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights-write") as writers:
                files = tuple(writers.map(write, parts, names))
        except OSError as error:
            num_bytes = sum(len(safetensors_file.header(part.entries)) + part.num_bytes for part in parts)
            return encode(Written(num_bytes=num_bytes, problem=error.strerror or str(error), error=error.errno or 0))
        return encode(Written(files=files, num_bytes=sum(file.num_bytes for file in files)))

    def _write_file(self, path: Path, part: Snapshot, stream: torch.cuda.Stream | None) -> WeightFile:
        header = safetensors_file.header(part.entries)
        with path.open("wb") as file:
            sha256 = safetensors_file.write(file, self._counted(itertools.chain([header], _blocks(part, stream))))
            file.flush()
            os.fsync(file.fileno())
        names = tuple(entry.name for entry in part.entries)
        return WeightFile(file=path.name, sha256=sha256, num_bytes=len(header) + part.num_bytes, names=names)

    def _counted(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for block in blocks:
            yield block
            with self._counting:
                self.progress += len(block)

    def _streams_for(self, snapshot: Snapshot) -> SimpleQueue[torch.cuda.Stream | None]:
        """Return a stream for each thread; None where nothing is on a GPU."""
        devices = (bucket.device for bucket in snapshot.buckets if not isinstance(bucket, HostBucket))
        gpu = next((device for device in devices if device.type == "cuda"), None)
        if gpu is not None and not self._streams:
            self._streams = [torch.cuda.Stream(gpu) for _ in range(_WRITERS)]  # type: ignore[no-untyped-call]
        streams = SimpleQueue[torch.cuda.Stream | None]()
        for stream in self._streams if gpu is not None else [None] * _WRITERS:
            streams.put(stream)
        return streams


def _split(snapshot: Snapshot) -> Iterator[Snapshot]:
    """Yield what goes into each file, tensor by tensor, in order.

    The order, and where files end, depend on the tensors alone, and not on their buckets, which differ from version to
    version, as where they are copied does: a delta is of equal places in files of equal size (objects_channel.py).
    """
    tensors = [one for bucket in snapshot.buckets for one in bucket.cut(1)]
    tensors.sort(key=lambda one: (-one.entries[0].dtype.itemsize, one.entries[0].name))
    part, num_bytes = list[AnyBucket](), 0
    for tensor in tensors:
        if num_bytes and num_bytes + tensor.num_bytes > _FILE_BYTES:
            yield Snapshot(buckets=tuple(part))
            part, num_bytes = [], 0
        part.append(tensor)
        num_bytes += tensor.num_bytes
    yield Snapshot(buckets=tuple(part))


def _blocks(snapshot: Snapshot, stream: torch.cuda.Stream | None) -> Iterator[memoryview]:
    """Yield the bytes of a file, each block valid until the next. Kept buckets are filled one after the other."""
    on_device = [bucket for bucket in snapshot.buckets if not isinstance(bucket, HostBucket)]
    largest = max((bucket.num_bytes for bucket in on_device if bucket.device.type == "cuda"), default=0)
    staging = torch.empty(largest, dtype=torch.uint8, pin_memory=largest > 0)  # torch keeps pinned memory for reuse
    block = None
    for bucket in snapshot.buckets:
        if isinstance(bucket, HostBucket):
            data = bucket.on_host().data
        else:
            with torch.cuda.stream(stream):
                if bucket.is_kept and block is None:
                    size = max(one.num_bytes for one in on_device if one.is_kept)
                    block = torch.empty(size, dtype=torch.uint8, device=bucket.device)
                data = bucket.filled(block).data
                if stream is not None:
                    data = staging[: data.numel()].copy_(data, non_blocking=True)
                    stream.synchronize()
        yield memoryview(data.numpy())  # type: ignore[arg-type]


class PartReader(PartWorker):
    """Returns a part as the bytes of a safetensors file. For small parts."""

    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        data: bytes = safetensors.torch.save({name: tensor.cpu() for name, tensor in snapshot.tensors()})
        return data


def _dtype_of(snapshot: Snapshot) -> str:
    """Return the dtype that most numbers of a version have."""
    numbers = Counter[torch.dtype]()
    for entry in snapshot.entries:
        numbers[entry.dtype] += math.prod(entry.shape)
    return str(max(numbers, key=lambda dtype: numbers[dtype])).removeprefix("torch.")


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
        write_whole(folder / weight_files.INDEX_FILE, index)
    sync(folder)
    return sha256


def _bytes_in(folder: Path | None) -> int:
    """Return the bytes of the weight files in a folder that may be gone."""
    try:
        return sum(map(_length, folder.glob("*.safetensors"))) if folder is not None else 0
    except OSError:
        return 0


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
