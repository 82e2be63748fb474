"""The weight files in the folder of a version: one file, or one file per part of the model plus an index.

The index is Hugging Face's (model.safetensors.index.json), so the folder loads everywhere. Its metadata also contain
the size and checksum of every file. The announced checksum is that of the index, or of the only file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import WeightsError
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.adapter_names import ADAPTER_FILE, CONFIG_FILE

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_READERS: Final = 8
_SAMPLED_TENSORS: Final = 256
_SAMPLED_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One weight file of a version.  names: its tensors"""

    file: str
    sha256: str
    num_bytes: int
    names: tuple[str, ...] = ()


def file_name(number: int, count: int, *, whole: str = WEIGHTS_FILE) -> str:
    """Return the name of file ``number`` (from 0) of ``count``; ``whole`` if there is only one."""
    return whole if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def names_of_part(name: str, count: int) -> list[str]:
    """Return the names of the ``count`` files of a part whose only file would be ``name``.

    Those of a whole model are Hugging Face's: model-00001-of-00004.safetensors. Those of a rank's part begin with its
    own name: model-00001-of-00002-3.safetensors.
    """
    if count == 1:
        return [name]
    if name == WEIGHTS_FILE:
        return [file_name(number, count) for number in range(count)]
    return [f"{name.removesuffix('.safetensors')}-{number + 1}.safetensors" for number in range(count)]


def is_weight_file(name: str) -> bool:
    """Return whether this file holds weights or their index, unlike the other files in a model folder."""
    return name.endswith(".safetensors") or name == INDEX_FILE


def make_index(files: Sequence[WeightFile]) -> bytes:
    """Return the contents of the index file. Raises ValueError when two files have the same tensor."""
    weight_map = {name: one.file for one in files for name in one.names}
    if len(weight_map) != sum(len(one.names) for one in files):
        raise ValueError("two parts of the model have a tensor of the same name")
    parts = {one.file: {"sha256": one.sha256, "num_bytes": one.num_bytes} for one in files}
    metadata = {"total_size": sum(one.num_bytes for one in files), "parts": parts}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1).encode()


def read_index(data: bytes) -> list[WeightFile]:
    """Parse an index written by ``make_index``; the names of tensors are left out. Raises WeightsError."""
    try:
        parts: Any = json.loads(data)["metadata"]["parts"]
        return [
            WeightFile(file=name, sha256=str(about["sha256"]), num_bytes=int(about["num_bytes"]))
            for name, about in parts.items()
            if Path(name).name == name
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot parse an index of weights: {type(error).__name__}: {error}") from error


def _only_file(folder: Path) -> Path:
    """Return the path of the weight file of an unsplit model, or of adapters, whose file has another name."""
    return folder / (ADAPTER_FILE if (folder / CONFIG_FILE).exists() else WEIGHTS_FILE)


def paths(folder: Path) -> list[Path]:
    """Return the weight files of a folder in order. Raises WeightsError."""
    index = folder / INDEX_FILE
    try:
        if (only := _only_file(folder)).exists() or not index.exists():
            return [only]
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [folder / Path(name).name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{folder}: cannot read {INDEX_FILE}: {error}") from error


def num_bytes(folder: Path) -> int:
    """Return the total size of the weight files. Raises OSError, WeightsError."""
    return sum(path.stat().st_size for path in paths(folder))


def fingerprint(folder: Path) -> str:
    """Return a digest of the names, types and shapes of all tensors, and of some bytes of 256 of them.

    It tells models of the same sizes apart, and does not depend on the division into files. Raises WeightsError.
    """
    found = []
    try:
        for path in paths(folder):
            with path.open("rb") as stream:
                entries, start = safetensors_file.read_header(stream)
            for entry in entries:
                found.append((entry.name, path, start, entry))
                start += entry.num_bytes
        found.sort(key=lambda one: one[0])
        layout = [(name, str(entry.dtype), entry.shape) for name, *_, entry in found]
        digest = hashlib.sha256(json.dumps(layout).encode())
        for _, path, start, entry in found[:: -(-len(found) // _SAMPLED_TENSORS) or 1]:
            middle = entry.num_bytes // 2
            with path.open("rb") as stream:
                stream.seek(start + middle)
                digest.update(stream.read(min(_SAMPLED_BYTES, entry.num_bytes - middle)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder}: cannot read its weights: {error}") from error
    return digest.hexdigest()


def describe(folder: Path, entries: Mapping[str, Any]) -> None:
    """Set entries of the folder's config.json that say how its weights are stored."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    if settings | entries != settings:
        path.unlink()  # it may be a link to the file of another version
        path.write_text(json.dumps(settings | entries, indent=2))


def verify(folder: Path, *, sha256: str, num_bytes: int) -> None:
    """Raise WeightsError unless sizes and checksums match the published ones."""
    index = folder / INDEX_FILE
    if (only := _only_file(folder)).exists() or not index.exists():
        _verify(folder, WeightFile(file=only.name, sha256=sha256, num_bytes=num_bytes))
        return
    try:
        data = index.read_bytes()
    except OSError as error:
        raise WeightsError(f"{index}: cannot be read: {error.strerror}") from error
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise WeightsError(f"{index}: sha256 is {found[:12]}..., but {sha256[:12]}... was published")
    files = read_index(data)
    if (total := sum(one.num_bytes for one in files)) != num_bytes:
        raise WeightsError(f"{index}: says {total} bytes, but {num_bytes} were published")
    with ThreadPoolExecutor(min(_READERS, len(files)), thread_name_prefix="weights-verify") as readers:
        list(readers.map(lambda one: _verify(folder, one), files))


def _verify(folder: Path, expected: WeightFile) -> None:
    file = folder / expected.file
    try:
        size = file.stat().st_size
        if size != expected.num_bytes:
            raise WeightsError(f"{file}: has {size} bytes, but {expected.num_bytes} were published")
        found = safetensors_file.sha256(file)
    except FileNotFoundError:
        raise WeightsError(f"{file}: not found; removed for newer versions, or not on this machine") from None
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from error
    if found != expected.sha256:
        raise WeightsError(f"{file}: sha256 is {found[:12]}..., but {expected.sha256[:12]}... was published")
