"""The weights at one instant as flat buckets of bytes. Backends export snapshots, and weight channels transport them.

Buckets are ordered by element width, widest first, then by arrival, without gaps. Laid end to end they are the body of
a safetensors file. An engine that receives weights over the network takes each bucket in one collective (SGLang's
"flattened_bucket"); buckets that are too large for the engine are cut further.

What no step changes (frozen weights, and sums of frozen weights and copied adapters) is not copied for a snapshot: its
buckets are filled while they are sent or written (KeptBucket). What the next update changes is copied on the device, or
to the host (HostBucket, host_copies.py).
Test: tests/unit/tensors/test_snapshot.py.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import torch

BUCKET_BYTES: Final = 2 * 2**30
"""Bounds the extra memory that an engine needs while it receives new weights."""


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
    """Whole tensors end to end.  data: u8[sum of their bytes], on the device that they were copied from"""

    entries: tuple[TensorEntry, ...]
    data: torch.Tensor

    @classmethod
    def empty(cls, entries: Sequence[TensorEntry], device: torch.device) -> Bucket:
        """Allocate an uninitialised bucket for ``entries``."""
        num_bytes = sum(entry.num_bytes for entry in entries)
        return cls(entries=tuple(entries), data=torch.empty(num_bytes, dtype=torch.uint8, device=device))

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_kept(self) -> bool:
        return False

    def filled(self, block: torch.Tensor | None = None) -> Bucket:
        """See KeptBucket; this one needs no block."""
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, view into ``data``). One operation of torch for each: a mixture has thousands of tensors."""
        start = 0
        for dtype, entries in itertools.groupby(self.entries, key=lambda entry: entry.dtype):
            group = tuple(entries)
            stop = start + sum(entry.num_bytes for entry in group)
            of_dtype, start = self.data[start:stop].view(dtype), stop
            offset = int(of_dtype.storage_offset())
            for entry in group:
                yield entry.name, of_dtype.as_strided(entry.shape, _contiguous(entry.shape), offset)
                offset += math.prod(entry.shape)

    def cut(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Split into buckets of at most ``bucket_bytes`` without copying. A larger tensor gets a bucket of its own."""
        begin = 0
        for entries in grouped(self.entries, bucket_bytes):
            end = begin + sum(entry.num_bytes for entry in entries)
            yield Bucket(entries=tuple(entries), data=self.data[begin:end])
            begin = end


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1][: len(shape)]


Fill = Callable[[torch.Tensor], None]
"""Writes a tensor into one of its shape, on the current stream of any thread. Reads only what no step changes."""


class RowWriter(Protocol):
    """A matrix whose rows can be made at any time."""

    def write(self, into: torch.Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) into a matrix of as many rows. See Fill."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A Fill: some rows of a matrix. Neighbours in a bucket are written at once: a mixture has thousands of them."""

    matrix: RowWriter
    start: int
    stop: int

    def __call__(self, into: torch.Tensor) -> None:
        self.matrix.write(into, self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that is not copied for a snapshot.

    source        itself, which no step changes, or how to make it
    until_update  the next update changes it, so its bucket is copied to the host before (host_copies.py)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: torch.Tensor | Fill
    until_update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBucket:
    """A bucket that takes no memory until it is filled."""

    entries: tuple[TensorEntry, ...]
    device: torch.device
    sources: tuple[torch.Tensor | Fill, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def is_kept(self) -> bool:
        return True

    @torch.no_grad()
    def filled(self, block: torch.Tensor | None = None) -> Bucket:
        """Return the bucket in ``block``, u8 of at least its bytes, or in new memory; on CUDA by the current stream."""
        if block is None:
            block = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        bucket = Bucket(entries=self.entries, data=block[: self.num_bytes])
        views = [view for _, view in bucket.tensors()]
        same = [(view, source) for view, source in zip(views, self.sources, strict=True) if not callable(source)]
        if same:  # one call: a bucket of a mixture may have thousands
            torch._foreach_copy_([view for view, _ in same], [source for _, source in same])
        for view, fill in _joined(bucket, self.sources):
            fill(view)
        return bucket

    def cut(self, bucket_bytes: int) -> Iterator[KeptBucket]:
        """See Bucket.cut."""
        start = 0
        for entries in grouped(self.entries, bucket_bytes):
            stop = start + len(entries)
            yield replace(self, entries=tuple(entries), sources=self.sources[start:stop])
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBucket:
    """A bucket in host memory.

    data    u8[sum of the tensors' bytes], pinned if it came from a GPU
    device  from which it is sent
    done    when it has been copied to the host; None: it has
    """

    entries: tuple[TensorEntry, ...]
    data: torch.Tensor
    device: torch.device
    done: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def is_kept(self) -> bool:
        return True

    def filled(self, block: torch.Tensor | None = None) -> Bucket:
        """Return the bucket on ``device``; see KeptBucket."""
        if block is None:
            block = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return Bucket(entries=self.entries, data=block[: self.num_bytes].copy_(self.data, non_blocking=True))

    def on_host(self) -> Bucket:
        """Return the bucket in host memory. Waits until it is there."""
        if self.done is not None:
            self.done.synchronize()
        return Bucket(entries=self.entries, data=self.data)

    def cut(self, bucket_bytes: int) -> Iterator[HostBucket]:
        """See Bucket.cut."""
        for part in Bucket(entries=self.entries, data=self.data).cut(bucket_bytes):
            yield replace(self, entries=part.entries, data=part.data)


AnyBucket: TypeAlias = "Bucket | KeptBucket | HostBucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The weights at one instant, which later steps do not change: the whole model, or this rank's part of it."""

    buckets: tuple[AnyBucket, ...]
    others: tuple[Part, ...] = ()
    """Handles of the parts that other ranks hold. All other members describe only our own part."""

    @classmethod
    @torch.no_grad()
    def from_tensors(
        cls,
        tensors: Iterable[tuple[str, torch.Tensor | Kept]],
        *,
        dtype: torch.dtype | None = None,
        kept: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        to_host: Callable[[Bucket | KeptBucket], HostBucket] | None = None,
    ) -> Snapshot:
        """Copy ``tensors`` on their device. Floating-point tensors become ``dtype``, except those named in ``kept``.

        to_host: copies to the host what the next update changes, bucket by bucket, instead of on the device

        Tensors are consumed one at a time. Besides the copies, memory holds for each dtype the sources of a bucket that
        is not full yet, and one more tensor. A tensor larger than ``bucket_bytes`` gets a bucket of its own. What is
        Kept is not copied, has its own dtype, and shares no bucket with copies.

        On CUDA, waits for the queued copies. Raises ValueError when two tensors have the same name.
        """
        names = set[str]()
        waiting: dict[tuple[torch.dtype, bool, bool], list[tuple[TensorEntry, torch.Tensor | Kept]]] = {}
        waiting_bytes = Counter[tuple[torch.dtype, bool, bool]]()
        buckets: list[AnyBucket] = []

        def add(group: Sequence[tuple[TensorEntry, torch.Tensor | Kept]]) -> None:
            bucket, (_, first) = _bucket(group), group[0]
            lasts = isinstance(first, Kept) and not first.until_update
            buckets.append(bucket if lasts or to_host is None else to_host(bucket))

        for name, tensor in tensors:
            if name in names:
                raise ValueError(f"two tensors are named {name!r}")
            names.add(name)
            kind = tensor.dtype if isinstance(tensor, Kept) else _dtype(tensor, None if name in kept else dtype)
            entry = TensorEntry(name=name, dtype=kind, shape=tuple(tensor.shape))
            key = kind, isinstance(tensor, Kept), isinstance(tensor, Kept) and tensor.until_update
            group = waiting.setdefault(key, [])
            if group and waiting_bytes[key] + entry.num_bytes > bucket_bytes:
                add(group)
                group.clear()
                waiting_bytes[key] = 0
            group.append((entry, tensor))
            waiting_bytes[key] += entry.num_bytes
        for group in waiting.values():
            add(group)
        buckets.sort(key=lambda bucket: -bucket.entries[0].dtype.itemsize)
        if any(bucket.device.type == "cuda" for bucket in buckets if not isinstance(bucket, HostBucket)):
            torch.cuda.current_stream().synchronize()  # other threads read the copies on their own streams
        return cls(buckets=tuple(buckets))

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def device(self) -> torch.device:
        return self.buckets[0].device

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """In file order."""
        return (entry for bucket in self.buckets for entry in bucket.entries)

    def cut(self, bucket_bytes: int) -> Snapshot:
        """See Bucket.cut."""
        return replace(self, buckets=tuple(part for bucket in self.buckets for part in bucket.cut(bucket_bytes)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) in file order. Of kept buckets, only the one whose views are used takes memory."""
        for bucket in self.buckets:
            there = bucket.on_host() if isinstance(bucket, HostBucket) else bucket.filled()
            yield from there.tensors()

    def run_on_parts(self, worker: PartWorker, commands: Sequence[bytes]) -> list[bytes]:
        """Run ``worker`` on our part and on all other parts in parallel. Returns their answers, our own first.

        commands  one per part, our own first

        If parts fail, raises the error of the first of them after all have ended.
        """
        assert len(commands) == 1 + len(self.others)
        with ThreadPoolExecutor(max(1, len(self.others)), thread_name_prefix="weights-part") as threads:
            others = [
                threads.submit(part.run, type(worker), command)
                for part, command in zip(self.others, commands[1:], strict=True)
            ]
            own = worker(self, commands[0])
        return [own, *(answer.result() for answer in others)]


class PartWorker(ABC):
    """What a weight channel does with one part, in the process that holds the part.

    Each exporting rank holds a part of the model: whole tensors, none of which is in two parts. No rank holds the whole
    model. A channel processes the parts where they are, while training goes on there: it sends a command to each rank
    and gets a short answer.

    Subclasses are top-level classes without constructor arguments. Each process creates one instance and keeps it.
    Calls may overlap.
    """

    @abstractmethod
    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        """Process the part ``snapshot``. The sender of the command gets any exception as a WeightsError."""


class Part(Protocol):
    """Handle of a snapshot part on another learner rank. That rank keeps the part while this handle exists."""

    @property
    def rank(self) -> int: ...

    def run(self, worker: type[PartWorker], command: bytes) -> bytes:
        """Run ``worker`` on that rank and return its answer. Blocks.

        Raises WeightsError, or BackendError if the rank is gone.
        """
        ...


def _dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def grouped(entries: Sequence[TensorEntry], bucket_bytes: int) -> Iterator[list[TensorEntry]]:
    """Group neighbours of the same dtype, up to ``bucket_bytes`` each. One dtype per group keeps tensors aligned."""
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


def _joined(bucket: Bucket, sources: Sequence[torch.Tensor | Fill]) -> Iterator[tuple[torch.Tensor, Fill]]:
    """Yield the parts of a bucket that are made, each with its Fill. Rows that follow one another are one part.

    Gate and up of an expert are rows 0 to 8 and 8 to 16 of its matrix, and 16 to 32 are the next expert's: one part.
    """
    rows: Rows | None = None
    views: list[torch.Tensor] = []
    for (_, view), source in zip(bucket.tensors(), sources, strict=True):
        follows = isinstance(source, Rows) and rows and rows.matrix is source.matrix and rows.stop == source.start
        if rows is not None and not follows:
            yield _together(views), rows
            rows, views = None, []
        if isinstance(source, Rows):
            rows = Rows(source.matrix, source.start if rows is None else rows.start, source.stop)
            views.append(view)
        elif callable(source):
            yield view, source
    if rows is not None:
        yield _together(views), rows


def _together(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices that lie end to end in the bucket as one."""
    first = views[0]
    num_rows = sum(len(view) for view in views)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def _bucket(group: Sequence[tuple[TensorEntry, torch.Tensor | Kept]]) -> Bucket | KeptBucket:
    """Return a bucket of copies, or of what is Kept."""
    entries, (_, first) = [entry for entry, _ in group], group[0]
    if isinstance(first, Kept):
        sources = tuple(tensor.source for _, tensor in group if isinstance(tensor, Kept))
        return KeptBucket(entries=tuple(entries), device=first.device, sources=sources)
    bucket = Bucket.empty(entries, first.device)
    for (_, view), (_, tensor) in zip(bucket.tensors(), group, strict=True):
        assert isinstance(tensor, torch.Tensor)
        view.copy_(tensor)
    return bucket
