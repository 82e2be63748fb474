"""The weights at one instant, as flat buckets of bytes: what a backend exports and every weight channel carries.

Wide types first, then by name, without gaps: the buckets laid end to end are the body of a safetensors file, and each
is one collective for an engine that takes weights over the network (SGLang's "flattened_bucket"), cut further where
that is too much for it.
Test: tests/unit/tensors/test_snapshot.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

BUCKET_BYTES: Final = 2 * 2**30
"""Bounds the memory that an engine needs beside its weights while it takes new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Whole tensors end to end.  data u8[sum of their bytes], on the device they were copied from."""

    entries: tuple[TensorEntry, ...]
    data: torch.Tensor

    @classmethod
    def empty(cls, entries: Sequence[TensorEntry], device: torch.device) -> Bucket:
        """Room for ``entries``."""
        num_bytes = sum(entry.num_bytes for entry in entries)
        return cls(entries=tuple(entries), data=torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views into ``data``."""
        start = 0
        for entry in self.entries:
            yield entry.name, self.data[start : start + entry.num_bytes].view(entry.dtype).view(entry.shape)
            start += entry.num_bytes

    def cut(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The same bytes in buckets of at most ``bucket_bytes`` (a larger tensor has one of its own), not copied."""
        start = 0
        for entries in grouped(self.entries, bucket_bytes):
            stop = start + sum(entry.num_bytes for entry in entries)
            yield Bucket(entries=tuple(entries), data=self.data[start:stop])
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy that later steps do not change."""

    buckets: tuple[Bucket, ...]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
        kept: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Snapshot:
        """Copy ``tensors``, floating ones turned to ``dtype`` but those in ``kept``, on their device.

        Work still queued there is waited for. A tensor larger than ``bucket_bytes`` gets a bucket of its own. Raises
        ValueError when two have one name.
        """
        given = dict[str, torch.Tensor]()
        for name, tensor in tensors:
            if name in given:
                raise ValueError(f"two tensors are named {name!r}")
            given[name] = tensor
        entries = [
            TensorEntry(name=name, dtype=_dtype(tensor, None if name in kept else dtype), shape=tuple(tensor.shape))
            for name, tensor in given.items()
        ]
        entries.sort(key=lambda entry: (-entry.dtype.itemsize, entry.name))
        buckets = tuple(_copy(group, given) for group in grouped(entries, bucket_bytes))
        if any(bucket.data.is_cuda for bucket in buckets):
            torch.cuda.current_stream().synchronize()  # other threads read it on streams of their own
        return cls(buckets=buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.data.numel() for bucket in self.buckets)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """In file order."""
        return (entry for bucket in self.buckets for entry in bucket.entries)

    def cut(self, bucket_bytes: int) -> Snapshot:
        """See Bucket.cut."""
        return Snapshot(buckets=tuple(part for bucket in self.buckets for part in bucket.cut(bucket_bytes)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) in file order."""
        for bucket in self.buckets:
            yield from bucket.tensors()


def _dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def grouped(entries: Sequence[TensorEntry], bucket_bytes: int) -> Iterator[list[TensorEntry]]:
    """Neighbours together, as many as fit, of one type each: a bucket's tensors stay aligned."""
    group: list[TensorEntry] = []
    num_bytes = 0
    for entry in entries:
        if group and (num_bytes + entry.num_bytes > bucket_bytes or entry.dtype != group[0].dtype):
            yield group
            group, num_bytes = [], 0
        group.append(entry)
        num_bytes += entry.num_bytes
    if group:
        yield group


def _copy(entries: Sequence[TensorEntry], tensors: dict[str, torch.Tensor]) -> Bucket:
    device = tensors[entries[0].name].device
    bucket = Bucket.empty(entries, device)
    for name, view in bucket.tensors():
        view.copy_(tensors[name])
    return bucket
