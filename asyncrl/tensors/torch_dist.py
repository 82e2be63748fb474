"""Reads and writes checkpoints in Megatron's "torch_dist" format (torch.distributed.checkpoint) without Megatron.

    .metadata          dtype, size and chunks of every tensor; the place in a file of every chunk
    __3_0.distcp       chunks written by rank 3, each serialized by torch.save
    common.pt          data that are not tensors: the rules for keys (Megatron's content_metadata)
    metadata.json      name of the format

A tensor has the same key whichever ranks hold parts of it, and its chunks are rectangles. So each rank writes what it
holds without asking other ranks, and ranks of another layout read what they need. Megatron's own writer first gathers
optimizer states on one rank, exchanges pickles between ranks, and forks. This writer does none of these.

.metadata is a pickle. The reader allows only the classes of the format, so the pickle cannot run code.
Tests: tests/unit/tensors/test_torch_dist.py; Megatron reads it: tests/unit/backends/megatron/test_torch_dist.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from asyncrl.durable_files import write_whole
from asyncrl.errors import CheckpointError

METADATA: Final = ".metadata"
_COMMON: Final = "common.pt"
_CONFIG: Final = "metadata.json"
_CONTENT: Final = {
    "non_homogeneous_layers": True,  # the layer number is in the key; tensors have no layer dimension
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A rectangle of tensor ``key``: ``data`` begins at ``start`` in a tensor of size ``whole``."""

    key: str
    whole: Ints
    start: Ints
    data: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a chunk is stored: ``length`` bytes of ``file`` from ``offset`` on."""

    key: str
    dtype: str
    whole: Ints
    start: Ints
    sizes: Ints
    file: str
    offset: int
    length: int


def file_name(rank: int, number: int = 0) -> str:
    """Return the name of the ``number``-th file that ``rank`` writes."""
    return f"__{rank}_{number}.distcp"


def write_chunks(path: Path, chunks: Iterable[Chunk]) -> tuple[list[Stored], str]:
    """Write a file of chunks and sync it to disk. Returns where they are, and the file's SHA-256 in hexadecimal.

    Chunks are consumed and released one at a time. Raises OSError.
    """
    found = []
    with path.open("wb") as file:
        stream = _HashedStream(file)
        for chunk in chunks:
            offset = stream.num_bytes
            try:
                torch.save(chunk.data.contiguous(), stream)  # type: ignore[arg-type]  # needs only write and flush
            except RuntimeError:
                if stream.problem is not None:  # torch reports what it could not finish after that
                    raise stream.problem from None
                raise
            about = Stored(
                key=chunk.key,
                dtype=str(chunk.data.dtype).removeprefix("torch."),
                whole=chunk.whole,
                start=chunk.start,
                sizes=tuple(chunk.data.shape),
                file=path.name,
                offset=offset,
                length=stream.num_bytes - offset,
            )
            found.append(about)
        file.flush()
        os.fsync(file.fileno())
    return found, stream.digest.hexdigest()


class _HashedStream:
    """Hashes what it writes. Both release the GIL, so training steps can run at the same time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.problem: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.problem = error
            raise
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the caller flushes once, at the end of the file."""


def complete(folder: Path, stored: Iterable[Stored]) -> None:
    """Write the files that turn files of chunks into a checkpoint.

    Raises OSError; CheckpointError when chunks are missing.
    """
    tensors: dict[str, Any] = {}
    places = {}
    for one in stored:
        if one.key not in tensors:
            properties = dcp.TensorProperties(dtype=getattr(torch, one.dtype))
            tensors[one.key] = dcp.TensorStorageMetadata(properties=properties, size=torch.Size(one.whole), chunks=[])
        chunks = tensors[one.key].chunks
        index = dcp.MetadataIndex(one.key, torch.Size(one.start), len(chunks))
        chunks.append(dcp.ChunkStorageMetadata(offsets=torch.Size(one.start), sizes=torch.Size(one.sizes)))
        places[index] = filesystem._StorageInfo(one.file, one.offset, one.length)
    for key, tensor in tensors.items():
        there = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if there != math.prod(tensor.size):
            raise CheckpointError(
                f"{folder}: {key}: {there:,} values were written, but the tensor has {math.prod(tensor.size):,}"
            )
    made = dcp.Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=dcp.StorageMeta())
    common = io.BytesIO()
    torch.save({"content_metadata": _CONTENT, "checkpoint_version": 3.0, "iteration": 0}, common)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    write_whole(folder / _COMMON, common.getvalue())
    write_whole(folder / _CONFIG, json.dumps(config).encode())
    write_whole(folder / METADATA, pickle.dumps(made))


# -- reading -----------------------------------------------------------------------------------------------------------


class TorchDist:
    """Reads a checkpoint in ``folder``: the tensors by key, or any rectangle of a tensor."""

    def __init__(self, folder: Path, *, checks_sums: bool = False) -> None:
        """Raises CheckpointError. checks_sums: compare what is read with its CRC-32, where nothing else has"""
        self.folder = folder
        self._checks_sums = checks_sums
        made = _read_metadata(folder / METADATA)
        self._tensors: Mapping[str, Any] = {
            key: about for key, about in made.state_dict_metadata.items() if hasattr(about, "chunks")
        }
        self._places: Mapping[Any, Any] = made.storage_data
        self._held: tuple[Any, torch.Tensor] | None = None  # the last chunk: the next read is often from it

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def size(self, key: str) -> Ints:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._tensors[key].properties.dtype
        return dtype

    def read(self, key: str, start: Ints | None = None, sizes: Ints | None = None) -> torch.Tensor:
        """Return the rectangle of ``sizes`` at ``start``; by default the whole tensor.

        Besides the result, one chunk at a time is in memory. Raises CheckpointError.
        """
        if key not in self:
            raise CheckpointError(f"{self.folder}: has no {key}; is it a checkpoint of another model?")
        whole = self.size(key)
        start = start if start is not None else (0,) * len(whole)
        sizes = sizes if sizes is not None else whole
        if len(start) != len(whole) or any(
            at + size > most for at, size, most in zip(start, sizes, whole, strict=True)
        ):
            raise CheckpointError(
                f"{self.folder}: {key} has the size {list(whole)}, the model needs {list(sizes)} at {list(start)}; is "
                "it a checkpoint of another model?"
            )
        result, there = torch.empty(sizes, dtype=self.dtype(key)), 0
        for chunk in self._tensors[key].chunks:
            first = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            after = [min(a + n, b + m) for a, n, b, m in zip(start, sizes, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(first, after, strict=True)):
                continue
            data = self._chunk(key, chunk)
            wanted = tuple(slice(a - s, b - s) for a, b, s in zip(first, after, start, strict=True))
            found = tuple(slice(a - s, b - s) for a, b, s in zip(first, after, chunk.offsets, strict=True))
            result[wanted] = data[found]
            there += math.prod(b - a for a, b in zip(first, after, strict=True))
        if there != result.numel():
            raise CheckpointError(f"{self.folder}: of {key} {there:,} numbers are there, {result.numel():,} are needed")
        return result

    def _chunk(self, key: str, chunk: Any) -> torch.Tensor:
        index = dcp.MetadataIndex(key, chunk.offsets)
        if self._held is not None and self._held[0] == index:
            return self._held[1]
        self._held = None
        try:
            place = self._places[index]
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
            if len(data) < place.length:
                raise CheckpointError(f"{self.folder / place.relative_path}: ends within {key}; was it copied whole?")
            if self._checks_sums and zipfile.ZipFile(io.BytesIO(data)).testzip() is not None:
                raise CheckpointError(f"{self.folder / place.relative_path}: {key} is not as it was written")
            tensor: torch.Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise CheckpointError(f"{self.folder}: {key} cannot be read: {type(error).__name__} {error}") from error
        if not torch.is_tensor(tensor) or tensor.shape != torch.Size(chunk.sizes):
            raise CheckpointError(f"{self.folder}: {key} is not as {METADATA} says")
        self._held = (index, tensor.detach())
        return self._held[1]


_UNREADABLE: Final = (
    *(OSError, KeyError, RuntimeError, ValueError, EOFError),
    *(pickle.UnpicklingError, zipfile.BadZipFile),
)


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            made = _Unpickler(file).load()
        if not isinstance(made, dcp.Metadata) or not isinstance(made.storage_data, dict):
            raise CheckpointError(f"{path}: is not the metadata of a distributed checkpoint")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: is not a distributed checkpoint of Megatron: has no {METADATA}"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a truncated or modified pickle can raise anything
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    return made


_OF_METADATA: Final = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)


class _Unpickler(pickle.Unpickler):
    """Creates only objects of the format. Creating them has no side effects."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp.__name__ and name in _OF_METADATA:
            return getattr(dcp, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {str(torch.strided): torch.strided}.__getitem__
        if module.startswith("pathlib") and name.endswith("Path"):  # the folder it was written to
            return lambda *parts: "/".join(parts)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise CheckpointError(f"names {module}.{name}, which does not belong in a checkpoint; it is not loaded")
