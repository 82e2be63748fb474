"""Kept buckets on their way to engines: what is alive at a time, and what remains when an engine dies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import WeightsError
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.tensors.host_copies import HostCopies
from asyncrl.tensors.snapshot import Kept, KeptBucket, Rows, Snapshot
from asyncrl.weights import files, nccl
from asyncrl.weights.nccl import Sender
from asyncrl.weights.ring import Ring

CPU = torch.device("cpu")
NUMBERS = 100
"""Numbers of a tensor of which a bucket has one: 400 bytes."""


def kept(count: int, *, factor: float = 1.0) -> Snapshot:
    """Return tensors 0, 1, ... that consist of their number times ``factor``; every second one is made when needed."""

    def made(number: int) -> Kept:
        value = number * factor
        source: Any = torch.full((NUMBERS,), value) if number % 2 else lambda into: into.fill_(value)
        return Kept(shape=(NUMBERS,), dtype=torch.float32, device=CPU, source=source)

    return Snapshot.from_tensors([(str(number), made(number)) for number in range(count)], bucket_bytes=4 * NUMBERS)


def on_host(count: int) -> Snapshot:
    """Return the same tensors, copied to the host."""
    tensors = [
        (name, Kept(shape=(NUMBERS,), dtype=torch.float32, device=CPU, source=one, until_update=True))
        for name, one in kept(count).tensors()
    ]
    return Snapshot.from_tensors(tensors, bucket_bytes=4 * NUMBERS, to_host=HostCopies(CPU).copy)


SNAPSHOTS = pytest.mark.parametrize("snapshot_of", [kept, on_host])


class Engine:
    """An NCCL process group with one engine, which reads a broadcast when the sender looks for the ``looks``-th time.

    It dies after ``most`` broadcasts.
    """

    def __init__(self, *, looks: int = 3, most: int = 1000) -> None:
        self.received: list[float] = []
        self._looks, self._most = looks, most
        self.on_broadcast: Callable[[], None] = lambda: None

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> Any:
        self.on_broadcast()
        return Work(self, tensors[0], looks=self._looks)

    def read(self, data: torch.Tensor) -> None:
        if len(self.received) == self._most:
            raise RuntimeError("connection reset by peer")
        numbers = data.view(torch.float32)
        assert (numbers == numbers[0]).all()
        self.received.append(float(numbers[0]))

    def abort(self) -> None:
        pass


class Work:
    def __init__(self, engine: Engine, data: torch.Tensor, *, looks: int) -> None:
        self._engine, self._data, self._looks = engine, data, looks

    def is_completed(self) -> bool:
        self._looks -= 1
        if self._looks == 0:
            self._engine.read(self._data)
        return self._looks <= 0


def over_nccl(sender: Sender, engine: Any, name: str = "w0") -> None:
    """Send the weights to a joined engine, with ``engine`` in place of NCCL's group."""
    first, then = (
        TransferRequest(engine=name, group=f"{name}-1", num_ranks=1, has_joined=joined) for joined in (False, True)
    )
    sender.begin(first)
    group = sender._own._groups[name]
    group._kind, group._collective = "nccl", engine
    group.is_free.release()
    sender.begin(then).send()


def sender_of(snapshot: Snapshot, *, ring_buckets: int) -> Sender:
    sender = Sender("127.0.0.1", bucket_bytes=4 * NUMBERS)
    sender._own.ring = Ring(ring_buckets * 4 * NUMBERS)
    sender.set_weights(snapshot, incarnation=0, policy_version=1)
    return sender


@SNAPSHOTS
def test_engines_receive_what_is_filled_while_it_is_sent(snapshot_of: Callable[[int], Snapshot]) -> None:
    """No block is filled again before its broadcast has ended: the engine reads as late as it can."""
    engine = Engine(looks=3)
    over_nccl(sender_of(snapshot_of(20), ring_buckets=2), engine)
    assert engine.received == list(range(20))


@SNAPSHOTS
def test_engines_share_one_ring_however_many_they_are(snapshot_of: Callable[[int], Snapshot]) -> None:
    sender, engines = sender_of(snapshot_of(20), ring_buckets=3), [Engine(looks=2) for _ in range(8)]
    ring, most = sender._own.ring, []
    for engine in engines:
        engine.on_broadcast = lambda: most.append(ring.num_bytes)
    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(lambda one: over_nccl(sender, one[1], f"w{one[0]}"), enumerate(engines)))
    assert [engine.received for engine in engines] == [list(range(20))] * 8
    assert max(most) <= 3 * 4 * NUMBERS
    assert ring.num_bytes <= 3 * 4 * NUMBERS


@SNAPSHOTS
def test_an_engine_killed_between_two_buckets_leaves_the_ring_whole(snapshot_of: Callable[[int], Snapshot]) -> None:
    sender = sender_of(snapshot_of(20), ring_buckets=2)
    with pytest.raises(WeightsError, match="connection reset by peer"):
        over_nccl(sender, Engine(most=5))
    assert sender._own.ring._taken_bytes == 0
    other = Engine()
    over_nccl(sender, other, "w1")
    assert other.received == list(range(20))


def test_an_engine_that_asks_during_an_export_gets_the_new_weights() -> None:
    """And nothing holds the old ones, whose memory the export may take."""
    sender, engine, old = sender_of(kept(20), ring_buckets=2), Engine(), kept(1)
    sender.set_weights(old, incarnation=0, policy_version=1)
    held = sys.getrefcount(old)
    sender.withdraw()
    assert sys.getrefcount(old) == held - 1
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(over_nccl, sender, engine)
        sender.set_weights(kept(5), incarnation=0, policy_version=2)
        sending.result()
    assert engine.received == list(range(5))


def test_engines_that_are_gone_are_forgotten_without_waiting_for_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_of(kept(1), ring_buckets=2)
    sender.withdraw()
    waits = list[object]()
    monkeypatch.setattr(sender._changed, "wait_for", lambda *until: waits.append(until))
    sender.forget(engines=set())
    assert not waits


def test_an_export_that_is_tried_again_is_still_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_EXPORT_SECONDS", 0.01)
    sender = sender_of(kept(1), ring_buckets=2)
    for _ in range(2):
        sender.withdraw()
    with pytest.raises(WeightsError, match=r"still exports a version, after 0\.01 s"):
        sender._held()


def test_a_bucket_that_is_larger_than_the_ring_passes_alone() -> None:
    ring = Ring(1000)
    small = ring.take(600, CPU, seconds=0)
    assert small is not None
    assert ring.take(5000, CPU, seconds=0) is None
    assert ring.take(600, CPU, seconds=0) is None
    ring.give(small)
    large = ring.take(5000, CPU, seconds=0)
    assert large is not None and ring.num_bytes == 5000
    assert ring.take(1, CPU, seconds=0) is None
    ring.give(large)
    again = ring.take(600, CPU, seconds=0)
    assert again is large, "a free block is used again"


def test_a_transfer_waits_for_a_block_and_gets_it_when_another_ends() -> None:
    ring = Ring(1000)
    first, got = ring.take(1000, CPU, seconds=0), []
    assert first is not None
    waiting = threading.Thread(target=lambda: got.append(ring.take(1000, CPU, seconds=60)))
    waiting.start()
    ring.give(first)
    waiting.join()
    assert got == [first] or got[0] is first
    began = time.monotonic()
    assert ring.take(1000, CPU, seconds=0.01) is None
    assert time.monotonic() - began < 60


def test_a_kept_bucket_takes_no_memory_until_it_is_filled() -> None:
    snapshot = kept(6, factor=0.5)
    assert all(isinstance(bucket, KeptBucket) for bucket in snapshot.buckets)
    assert snapshot.num_bytes == 6 * 4 * NUMBERS
    (block,) = {torch.full((500,), 255, dtype=torch.uint8)}
    for number, bucket in enumerate(snapshot.buckets):
        filled = bucket.filled(block)
        assert filled.data.data_ptr() == block.data_ptr()
        assert filled.data.view(torch.float32).tolist() == [number * 0.5] * NUMBERS
    assert (block[400:] == 255).all()


class Numbers:
    """A matrix whose row n consists of n. Counts how often rows are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def write(self, into: torch.Tensor, start: int, stop: int) -> None:
        self.asked.append((start, stop))
        into.copy_(torch.arange(float(start), stop)[:, None].expand(stop - start, 5))


def test_rows_that_follow_one_another_are_made_at_once() -> None:
    """Rows 0 to 2 and 2 to 5 of the first matrix, then one of another, then rows 7 and 8, and 0 again."""
    first, other = Numbers(), Numbers()
    ranges = [(first, 0, 2), (first, 2, 5), (other, 5, 6), (first, 7, 8), (first, 8, 9), (first, 0, 1)]

    def rows(matrix: Numbers, start: int, stop: int) -> Kept:
        return Kept(shape=(stop - start, 5), dtype=torch.float32, device=CPU, source=Rows(matrix, start, stop))

    snapshot = Snapshot.from_tensors([(str(number), rows(*one)) for number, one in enumerate(ranges)])
    made = [tensor[:, 0].tolist() for _, tensor in snapshot.tensors()]
    assert made == [list(range(start, stop)) for _, start, stop in ranges]
    assert (first.asked, other.asked) == ([(0, 5), (7, 9), (0, 1)], [(5, 6)])


def test_a_writer_fills_one_block_over_and_over(tmp_path: Path) -> None:
    blocks = set[int]()

    def made(number: int) -> Kept:
        def fill(into: torch.Tensor) -> None:
            blocks.add(into.untyped_storage().data_ptr())
            into.fill_(float(number))

        return Kept(shape=(NUMBERS,), dtype=torch.float32, device=CPU, source=fill)

    model = tmp_path / "model"
    model.mkdir()
    channel = files.FilesChannel(tmp_path / "weights", keep=2, model_path=model)
    snapshot = Snapshot.from_tensors([(f"{number:02}", made(number)) for number in range(20)])
    version = channel.publish(snapshot, incarnation=0, policy_version=1)
    stored = load_file(channel.verify(version) / "model.safetensors")
    assert [float(stored[name][0]) for name in sorted(stored)] == list(range(20))
    assert len(blocks) == 1
