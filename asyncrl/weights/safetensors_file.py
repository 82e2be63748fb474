"""Writes a safetensors file as a stream, hashing what it writes: no second copy in memory, no second read for the hash.

Format: eight bytes length of the header, little-endian; the header, JSON padded with spaces to a multiple of eight;
the tensors' bytes without gaps. huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

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


def layout(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[torch.Tensor], bytes]:
    """The tensors in file order, and the header that says so. Wide types first, so that each is aligned."""
    ordered = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        if name in table:
            raise ValueError(f"two tensors are named {name!r}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name}: safetensors has no {tensor.dtype}")
        num_bytes = math.prod(tensor.shape) * tensor.element_size()
        table[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [tensor for _, tensor in ordered], len(header).to_bytes(8, "little") + header


def write(stream: BinaryIO, tensors: Iterable[torch.Tensor], header: bytes) -> str:
    """Header and tensors to ``stream``; returns the SHA-256 of it all, hexadecimal."""
    digest = hashlib.sha256(header)
    stream.write(header)
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        stream.write(data)
        digest.update(data)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Of the file at ``path``, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
