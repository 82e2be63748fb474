"""Weights as a safetensors file: write it as a stream, hash it while writing, and read its header.

Writing needs no second copy in memory, and hashing no second read.

Format: the header's length (eight bytes, little-endian); the header, JSON padded with spaces to a multiple of eight;
then the bytes of the tensors without gaps. huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from asyncrl.tensors.snapshot import TensorEntry

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def header(entries: Iterable[TensorEntry]) -> bytes:
    """Return the length and header for tensors that follow each other in this order without gaps."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{entry.name}: safetensors has no {entry.dtype}")
        table[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(stream: BinaryIO) -> tuple[list[TensorEntry], int]:
    """Return the tensors in byte order, and the offset of the first one. Raises OSError, ValueError."""
    num_bytes = int.from_bytes(stream.read(8), "little")
    table = json.loads(stream.read(num_bytes))
    table.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    entries, end = [], 0
    for name, about in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = about["data_offsets"]
        if about["dtype"] not in dtypes:
            raise ValueError(f"{name} is {about['dtype']}, an unknown dtype")
        entry = TensorEntry(name=name, dtype=dtypes[about["dtype"]], shape=tuple(about["shape"]))
        if (start, stop) != (end, end + entry.num_bytes):
            raise ValueError(f"{name} is at {start}..{stop}, expected at {end}..{end + entry.num_bytes}")
        entries.append(entry)
        end = stop
    return entries, 8 + num_bytes


def sections(entries: Iterable[TensorEntry], *, header_bytes: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, itemsize) of the header and of each run of tensors with elements of the same width."""
    found = [(0, header_bytes, 1)]
    for entry in entries:
        start, stop, itemsize = found[-1]
        if itemsize == entry.dtype.itemsize:
            found[-1] = (start, stop + entry.num_bytes, itemsize)
        else:
            found.append((stop, stop + entry.num_bytes, entry.dtype.itemsize))
    return found


def write(stream: BinaryIO, blocks: Iterable[bytes | memoryview]) -> str:
    """Write header and tensors to ``stream`` in order. Returns the SHA-256 of the whole file in hexadecimal."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="weights-hash") as beside:
        for block in blocks:
            hashed = beside.submit(digest.update, block)  # hashing takes as long as writing; both release the GIL
            stream.write(block)
            hashed.result()
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of the file at ``path`` in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
