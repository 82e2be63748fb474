"""Weight versions as model folders in a directory shared by the learner and every engine.

Invariants (tests/contracts/test_weights.py):
  C1 a version's folder appears atomically: it is written under another name, synced, and renamed.
  C2 the newest version is never removed; of the others the newest ``keep`` - 1 stay, and those that are retained.
  C3 a reader gets exactly the bytes that were published, or WeightsError.
  C4 files of the newest version that somebody removes are written again: the writer has the weights open.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.errors import WeightsError
from asyncrl.logs import is_at
from asyncrl.messages import WeightVersion
from asyncrl.protocols.adapter import RunConfig
from asyncrl.tensors import adapter_names, fp8, safetensors_file
from asyncrl.tensors.adapter_names import ADAPTER_FILE, CONFIG_FILE
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.adapter import ChannelAdapter

log = logging.getLogger("asyncrl.learner")

WEIGHTS_FILE: Final = "model.safetensors"


def weights_file(folder: Path) -> Path:
    """Of a model, or of adapters, which have another name."""
    return folder / (ADAPTER_FILE if (folder / CONFIG_FILE).exists() else WEIGHTS_FILE)


_STAGING_BYTES: Final = 512 * 2**20
"""Copied from the device at once, and pinned on the host."""
_COPIED_BYTES: Final = 2**20
_TEMPORARY: Final = ".tmp-"
_COMPANIONS: Final = (".json", ".jinja", ".txt", ".model")
"""Suffixes of a model folder's files other than weights: config, generation config, tokenizer, chat template."""


class FilesChannel(ChannelAdapter):
    """Folders DIRECTORY/INCARNATION-POLICY_VERSION. One writer; any number of readers, in any process."""

    takes = frozenset({"adapters", "fp8"})

    @classmethod
    def required_paths(cls, run: RunConfig) -> Mapping[str, Path]:
        if run.weights.directory:
            return {"weights.directory": run.weights_directory}
        return {"run.directory": run.run_directory}

    def __init__(self, directory: Path, *, keep: int, model_path: Path, links: bool = True) -> None:
        """
        keep        versions kept
        model_path  the folder whose config and tokenizer are added to every version
        links       hard-link them to the version before; False where people may write into a version's folder
        """
        self._directory = directory.absolute()
        self._keep = max(keep, 1)
        self._model_path = model_path
        self._links = links
        self._previous: Path | None = None
        self._adapters: Mapping[str, Any] | None = None  # adapter_config.json, if it is adapters that are published
        self._is_quantized = False
        self._published: WeightVersion | None = None
        self._weights: _OpenFile | None = None  # its file: the bytes outlive their name
        self._companions: frozenset[str] = frozenset()
        self._retained: set[tuple[int, int]] = set()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self.progress = 0
        self.published_bytes = 0

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Write one version and remove old ones. Raises WeightsError when it cannot be written (disk full)."""
        header = safetensors_file.header(snapshot.entries)
        num_bytes = len(header) + snapshot.num_bytes
        name = f"{incarnation}-{policy_version}"
        folder, temporary = self._directory / name, self._directory / f"{_TEMPORARY}{name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            sha256 = self._write(temporary, snapshot, header)
            if os.path.lexists(folder):  # published by an earlier process that crashed before its checkpoint
                self._discard(folder)
            temporary.rename(folder)
            _sync(self._directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._cannot_write(name, num_bytes, error) from error
        self._previous = folder if self._links else None
        self._collect(newest=(incarnation, policy_version))
        self.published_bytes = num_bytes
        version = WeightVersion(
            incarnation=incarnation, policy_version=policy_version, uri=str(folder), sha256=sha256, num_bytes=num_bytes
        )
        self._hold(version)
        return version

    def restore(self) -> WeightVersion | None:
        """The newest version, if files of it were gone and are there again. A look at names costs a few calls.

        Raises WeightsError when they cannot be written now, and once when they never can: the next version will be.
        """
        version = self._published
        if version is None or self._stands(version):
            return None
        folder, temporary = Path(version.uri), self._directory / f"{_TEMPORARY}{Path(version.uri).name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
            self._write_companions(temporary)
            found = self._copied(weights_file(temporary))
            if found != version.sha256:
                self._published = None
                raise WeightsError(f"{folder}: files of it were removed or damaged; engines wait for the next version")
            if os.path.lexists(folder):
                self._discard(folder)
            temporary.rename(folder)
            _sync(self._directory)
        except OSError as error:
            raise self._cannot_write(folder.name, version.num_bytes, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._hold(version)
        log.warning("%s: files of it were removed; written again, %s bytes", folder, f"{version.num_bytes:,}")
        return version

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version, with size and checksum verified. Raises WeightsError."""
        return verified(weights)

    def retain(self, weights: WeightVersion) -> None:
        self._retained.add(weights.order)

    def release(self, weights: WeightVersion) -> None:
        self._retained.discard(weights.order)

    def _write(self, temporary: Path, snapshot: Snapshot, header: bytes) -> str:
        """Write a whole model folder, synced to disk; returns the checksum of its weights."""
        temporary.mkdir()
        self._adapters = adapter_names.config(snapshot.entries, base=self._model_path)
        self._is_quantized = any(fp8.is_scale(entry.name) for entry in snapshot.entries)
        self._add_companions(temporary)
        with weights_file(temporary).open("wb") as stream:
            sha256 = safetensors_file.write(stream, itertools.chain([header], self._blocks(snapshot)))
            stream.flush()
            os.fsync(stream.fileno())
        _sync(temporary)
        return sha256

    def _hold(self, version: WeightVersion) -> None:
        """It is the one to write again. Never fails: without what it needs for that, it is none."""
        if self._weights is not None:
            self._weights.close()
        self._published, self._weights = None, None
        with contextlib.suppress(OSError):
            self._weights = _OpenFile(weights_file(Path(version.uri)))
            self._companions = frozenset(os.listdir(version.uri))
            self._published = version

    def _stands(self, version: WeightVersion) -> bool:
        """Whether the files of a version have their names and their lengths."""
        folder, file = Path(version.uri), self._weights
        assert file is not None
        try:
            is_there = is_at(weights_file(folder), file.descriptor) and self._companions <= frozenset(
                os.listdir(folder)
            )
            return is_there and os.fstat(file.descriptor).st_size == version.num_bytes
        except OSError:
            return False

    def _copied(self, path: Path) -> str:
        """Write what is open to ``path``, synced to disk; returns its checksum."""
        assert self._weights is not None
        with path.open("wb") as stream:
            sha256 = safetensors_file.write(stream, self._weights.blocks())
            stream.flush()
            os.fsync(stream.fileno())
        _sync(path.parent)
        return sha256

    def _blocks(self, snapshot: Snapshot) -> Iterator[memoryview]:
        for bucket in snapshot.cut(_STAGING_BYTES).buckets:
            yield self._to_host(bucket)
            self.progress += bucket.data.numel()

    def _to_host(self, bucket: Bucket) -> memoryview:
        """The bucket's bytes on the CPU, valid until the next call; does not block the device's other work."""
        data = bucket.data
        if data.is_cuda:
            if self._staging.numel() < data.numel():
                self._staging = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
            stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self._staging[: data.numel()].copy_(data, non_blocking=True)
            stream.synchronize()
            data = self._staging[: data.numel()]
        return memoryview(data.numpy())  # type: ignore[arg-type]

    def _add_companions(self, folder: Path) -> None:
        """Config and tokenizer: links to those of the previous version, or copies of the model's."""
        if self._previous is not None and self._previous.is_dir():
            for file in self._previous.iterdir():
                if file.name not in (WEIGHTS_FILE, ADAPTER_FILE):
                    _link(file, folder / file.name)
            return
        self._write_companions(folder)

    def _write_companions(self, folder: Path) -> None:
        """Config and tokenizer of the model's folder, and what says that the weights are others than its."""
        add_companions(folder, self._model_path)
        if self._adapters is not None:
            (folder / CONFIG_FILE).write_text(json.dumps(self._adapters, indent=1))
        if self._is_quantized:
            fp8.described(folder / "config.json")

    def _collect(self, *, newest: tuple[int, int]) -> None:
        versions = sorted(version for path in self._directory.iterdir() if (version := _version(path)) is not None)
        older = [version for version in versions if version < newest]
        newer = [version for version in versions if version > newest]  # of an earlier run in this directory
        for incarnation, policy_version in newer + older[: max(0, len(older) - (self._keep - 1))]:
            if (incarnation, policy_version) in self._retained:
                continue
            self._discard(self._directory / f"{incarnation}-{policy_version}")

    def _discard(self, folder: Path) -> None:
        """Rename, then delete: a reader finds the version complete or not at all."""
        hidden = folder.with_name(f"{_TEMPORARY}old-{folder.name}")
        folder.rename(hidden)
        _remove(hidden)

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left."""
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            _remove(path)

    def _cannot_write(self, name: str, num_bytes: int, error: OSError) -> WeightsError:
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            there = shutil.disk_usage(self._directory).free
            free = f", {there:,} are free; make room, lower weights.keep, or set weights.directory"
        return WeightsError(
            f"{self._directory}: cannot write weights {name}: {error.strerror}; it needs {num_bytes:,} bytes{free}"
        )


class _OpenFile:
    """To be read whatever becomes of its name. Closed with the last reference, or before."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def blocks(self) -> Iterator[bytes]:
        """All of it."""
        position = 0
        while block := os.pread(self.descriptor, _COPIED_BYTES, position):
            yield block
            position += len(block)


def verified(weights: WeightVersion) -> Path:
    """The folder of a version whose size and checksum are right. Raises WeightsError."""
    folder = Path(weights.uri)
    file = weights_file(folder)
    try:
        num_bytes = file.stat().st_size
        if num_bytes != weights.num_bytes:
            raise WeightsError(f"{file}: has {num_bytes} bytes, but {weights.num_bytes} were published")
        found = safetensors_file.sha256(file)
    except FileNotFoundError:
        raise WeightsError(f"{file}: not found; removed for newer versions, or not on this machine") from None
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from error
    if found != weights.sha256:
        raise WeightsError(f"{file}: sha256 is {found[:12]}..., but {weights.sha256[:12]}... was published")
    return folder


def add_companions(folder: Path, model_path: Path) -> None:
    """Copy everything except weights from the model's folder."""
    for file in sorted(model_path.iterdir()):
        if file.suffix in _COMPANIONS and not file.name.endswith(".index.json") and file.is_file():
            shutil.copyfile(file, folder / file.name)


def _version(path: Path) -> tuple[int, int] | None:
    incarnation, dash, policy_version = path.name.partition("-")
    return (
        (int(incarnation), int(policy_version)) if dash and incarnation.isdigit() and policy_version.isdigit() else None
    )


def _link(file: Path, name: Path) -> None:
    """Hard-link the file, or copy it where the file system has no hard links (object stores, exFAT)."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _remove(path: Path) -> None:
    """A folder, or what somebody put in the place of one."""
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
