"""Writes one part of a model to a safetensors file, in the process of the rank that holds the part."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors.torch
import torch

from asyncrl.messages.codec import decode, encode
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.parts import on_every_part
from asyncrl.tensors.snapshot import Bucket, PartWorker, Snapshot

_STAGING_BYTES: Final = 512 * 2**20
"""Bytes copied from the device at once, and pinned on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
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

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        header = safetensors_file.header(snapshot.entries)
        num_bytes = len(header) + snapshot.num_bytes
        try:
            with Path(decode(order, WriteOrder).file).open("wb") as stream:
                sha256 = safetensors_file.write(stream, itertools.chain([header], self._blocks(snapshot)))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            return encode(Written(num_bytes=num_bytes, problem=error.strerror or str(error), error=error.errno or 0))
        names = tuple(entry.name for entry in snapshot.entries)
        return encode(Written(sha256=sha256, num_bytes=num_bytes, names=names))

    def _blocks(self, snapshot: Snapshot) -> Iterator[memoryview]:
        buckets = snapshot.cut(_STAGING_BYTES).buckets
        largest = max((bucket.data.numel() for bucket in buckets if bucket.data.is_cuda), default=0)
        staging = torch.empty(largest, dtype=torch.uint8, pin_memory=largest > 0)  # torch keeps pinned memory for reuse
        for bucket in buckets:
            yield _to_host(bucket, staging)
            self.progress += bucket.data.numel()


def _to_host(bucket: Bucket, staging: torch.Tensor) -> memoryview:
    """Return the bucket's bytes on the CPU, valid until the next call. Does not block other work of the device."""
    data = bucket.data
    if data.is_cuda:
        stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            staging[: data.numel()].copy_(data, non_blocking=True)
        stream.synchronize()
        data = staging[: data.numel()]
    return memoryview(data.numpy())  # type: ignore[arg-type]


class PartReader(PartWorker):
    """Returns a part as the bytes of a safetensors file. For small parts."""

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        data: bytes = safetensors.torch.save({name: tensor.cpu() for name, tensor in snapshot.tensors()})
        return data


def whole_adapters(snapshot: Snapshot) -> Snapshot:
    """Collect the adapters of all ranks in this process."""
    answers = on_every_part(snapshot, PartReader(), [b""] * (1 + len(snapshot.others)))
    return Snapshot.from_tensors(item for answer in answers for item in safetensors.torch.load(answer).items())
