"""Receives the learner's buckets inside an SGLang server while the model loads those that came before.

SGLang receives a bucket, loads it, and only then takes the next one: nothing is sent while Python copies tensors into
place, and Python waits while a bucket is on its way. Here broadcasts run ahead of the loading, on their own stream.

Invariants (tests/unit/engines/sglang/test_receiving.py, test_receiving_order.py):
  A1 no bucket is received into memory that a queued copy still reads, or loaded before it has arrived.
  A2 at most AT_ONCE buckets are in memory, also if the model keeps their tensors until its call returns. A tensor that
     is larger than a bucket takes the room of several.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.messages.weight_transfer import BucketLayout
from asyncrl.tensors.snapshot import Bucket, TensorEntry
from asyncrl.weights.bucket_layout import entries_of

AT_ONCE: Final = 4
"""Buckets in memory: two that arrive, the one that is loaded, and the previous one, whose last tensor the model's loop
still holds."""
_AHEAD: Final = AT_ONCE - 1
"""Buckets of these whose tensors are not all loaded."""
_LEARNER_AND_WE: Final = 2

Parts = Sequence[tuple[str, Sequence[BucketLayout]]]
"""The name of each group, and the buckets that its learner rank sends."""


def describe_parts(parts: Parts) -> str:
    return json.dumps([[group, [[one.names, one.dtypes, one.shapes] for one in buckets]] for group, buckets in parts])


def arrivals(instruction: str, problem: Path, device: torch.device) -> Arrivals | None:
    """Begin to receive what ``instruction`` describes (describe_parts), while the server's last step may still run.

    Returns None if this process cannot, and writes the reason to ``problem``: an exception would kill the server, which
    still has its old weights.
    """
    buckets = []
    try:
        for name, layouts in json.loads(instruction):
            # SGLang joins a group under our name for it, and torch knows all groups by their names.
            group = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]
            buckets += [(group, entries_of(_layout(*layout))) for layout in layouts]
    except (RuntimeError, AttributeError) as error:  # no such group, or another torch
        problem.write_text(str(error).partition("\n")[0])
        return None
    made = Arrivals(buckets, device)
    # One bucket, since the loader waits for the whole GPU before it loads. With more ranks the last step has
    # collectives of its own: they and ours might wait for one another.
    if all(group.size() == _LEARNER_AND_WE for group, _ in buckets):
        made.begin(at_most=1)
    return made


class Arrivals:
    """Buckets that arrive in order, from one group after the other."""

    def __init__(self, buckets: Sequence[tuple[Any, tuple[TensorEntry, ...]]], device: torch.device) -> None:
        """``buckets``: the process group and the tensors of each bucket."""
        self._left = deque(buckets)
        self._device = device
        # Torch shares streams of one priority among all who ask for one. SGLang's have the normal priority.
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._coming: deque[tuple[Bucket, Any]] = deque()
        self._loaded: list[tuple[StorageWeakRef, int]] = []
        """Memory that the model may still hold, and its bytes."""
        # Blocks of one size, so that the allocator always finds a free one. Only a tensor may be larger.
        self._block_bytes = max((_size(entries) for _, entries in buckets if len(entries) > 1), default=0)

    def begin(self, *, at_most: int = _AHEAD) -> None:
        """Begin broadcasts until ``at_most`` are not loaded completely, or there is no room for another."""
        while self._left and len(self._coming) < at_most and (not self._coming or self._has_room()):
            self._coming.append(self._begin_broadcast(*self._left.popleft()))

    def _has_room(self) -> bool:
        """Whether the next bucket fits into the memory of AT_ONCE buckets, beside those that are there."""
        coming = sum(bucket.data.untyped_storage().nbytes() for bucket, _ in self._coming)
        held = sum(num_bytes for memory, num_bytes in self._loaded if not memory.expired())  # type: ignore[no-untyped-call, misc]
        _, entries = self._left[0]
        return coming + held + max(_size(entries), self._block_bytes) <= AT_ONCE * self._block_bytes

    def load_into(self, model: Any) -> None:
        """Load all tensors.

        A model that collects tensors before it loads any is called again for each two buckets. It must accept a part of
        its tensors, as it must from SGLang, which calls it for each bucket.
        """
        while self._left or self._coming:
            model.load_weights(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) until there are no more, or the model holds tensors of two buckets."""
        while self._left or self._coming:
            self.begin()
            bucket, arrived = self._coming.popleft()
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            memory = bucket.data.untyped_storage()
            self._loaded.append((StorageWeakRef(memory), memory.nbytes()))  # type: ignore[no-untyped-call]
            del memory
            yield from bucket.tensors()
            del bucket
            self._loaded = [one for one in self._loaded if not one[0].expired()]  # type: ignore[no-untyped-call]
            if len(self._loaded) > 1:
                return

    def _begin_broadcast(self, group: Any, entries: tuple[TensorEntry, ...]) -> tuple[Bucket, Any]:
        """Begin a broadcast; return its bucket, and on CUDA the event of its arrival."""
        size = _size(entries)
        block = torch.empty(max(size, self._block_bytes), dtype=torch.uint8, device=self._device)
        bucket = Bucket(entries=entries, data=block[:size])
        if self._stream is None:
            dist.broadcast(bucket.data, src=0, group=group)
            return bucket, None
        # The allocator gives us the block of an earlier bucket as soon as nobody refers to it. The model's copies from
        # it are queued on the current stream by then, but they may not have run.
        is_free, arrived = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_free.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(is_free)
            dist.broadcast(bucket.data, src=0, group=group)
            arrived.record()
        return bucket, arrived


def _layout(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> BucketLayout:
    return BucketLayout(names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(map(tuple, shapes)))


def _size(entries: Sequence[TensorEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)
