"""The events between the broadcasts and the model's copies, on a GPU whose streams run at any pace."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.engines.sglang import receiving
from asyncrl.tensors.snapshot import TensorEntry

CPU = torch.device("cpu")
BUCKETS, TENSORS = 30, 5


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.has_happened = False

    def record(self) -> None:
        self._gpu.current.queue.append((None, lambda: setattr(self, "has_happened", True)))


class Stream:
    """Work to do in order. Each piece waits for an event or None."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], None]]] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, lambda: None))


class Gpu:
    """Two streams, and an allocator that reuses a block as soon as nobody refers to it, as torch's does."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loading, self.receiving = Stream(), Stream()
        self.current = self.loading
        self.blocks: list[StorageWeakRef] = []
        self.content: dict[int, int] = {}
        """The number of the bucket that each block holds."""
        self._block_at: dict[int, int] = {}  # by address

    def run(self, most: int) -> None:
        """Do up to ``most`` pieces of work of random streams."""
        for _ in range(most):
            ready = [
                one
                for one in (self.loading, self.receiving)
                if one.queue and (one.queue[0][0] is None or one.queue[0][0].has_happened)
            ]
            if not ready:
                return
            self.random.choice(ready).queue.popleft()[1]()

    def empty(self, size: int) -> torch.Tensor:
        data = torch.zeros(size, dtype=torch.uint8)
        free = [number for number, block in enumerate(self.blocks) if block.expired()]  # type: ignore[no-untyped-call]
        number = free[0] if free else len(self.blocks)
        self.blocks[number : number + 1] = [StorageWeakRef(data.untyped_storage())]  # type: ignore[no-untyped-call]
        self._block_at[data.data_ptr()] = number
        return data

    def block_of(self, tensor: torch.Tensor) -> int:
        return self._block_at[tensor.untyped_storage().data_ptr()]

    @contextlib.contextmanager
    def stream(self, chosen: Stream) -> Iterator[None]:
        before, self.current = self.current, chosen
        yield
        self.current = before


class Network:
    """Queues a copy of each tensor. When it runs, it must find the tensor's bucket in the block."""

    def __init__(self, gpu: Gpu, keeps: int) -> None:
        self._gpu, self._keeps = gpu, keeps
        self.found: list[tuple[int, int]] = []
        """Of each copy, the bucket that should be in the block, and the one that was."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept: deque[tuple[str, torch.Tensor]] = deque()
        for item in weights:
            kept.append(item)
            if len(kept) > self._keeps:
                self._copy(*kept.popleft())
            self._gpu.run(self._gpu.random.choice([0, 0, 1, 5, 50]))
        while kept:
            self._copy(*kept.popleft())

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        wanted, block = int(name.partition(".")[0]), self._gpu.block_of(tensor)
        self._gpu.loading.queue.append((None, lambda: self.found.append((wanted, self._gpu.content.get(block, -1)))))


@pytest.mark.parametrize("keeps", [0, 3, 10**9])
@pytest.mark.parametrize("seed", range(20))
def test_every_copy_finds_its_bucket_at_any_pace_of_the_streams(
    monkeypatch: pytest.MonkeyPatch, seed: int, keeps: int
) -> None:
    gpu = Gpu(seed)
    buckets = [
        tuple(TensorEntry(name=f"{n}.{k}", dtype=torch.uint8, shape=(1 + k,)) for k in range(TENSORS))
        for n in range(BUCKETS)
    ]
    arriving = receiving.Arrivals([(n, entries) for n, entries in enumerate(buckets)], CPU)
    arriving._stream = gpu.receiving

    def broadcast(data: torch.Tensor, *, src: int, group: int) -> None:
        block = gpu.block_of(data)
        gpu.current.queue.append((None, lambda: gpu.content.update({block: group})))

    def empty(size: int, **_: Any) -> torch.Tensor:
        return gpu.empty(size)

    network = Network(gpu, keeps)
    with monkeypatch.context() as patched:
        patched.setattr(receiving.dist, "broadcast", broadcast)
        patched.setattr(receiving.torch, "empty", empty)
        patched.setattr(receiving.torch.cuda, "Event", lambda: Event(gpu))
        patched.setattr(receiving.torch.cuda, "stream", gpu.stream)
        patched.setattr(receiving.torch.cuda, "current_stream", lambda device: gpu.current)
        arriving.begin(at_most=1)
        arriving.load_into(network)
    gpu.run(10**9)
    assert not gpu.loading.queue and not gpu.receiving.queue
    assert network.found == [(n, n) for n in range(BUCKETS) for _ in range(TENSORS)]
    assert len(gpu.blocks) <= receiving.AT_ONCE
