"""Copies of buckets in host memory: their bytes, and what waits for what on a device with streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncrl.tensors.host_copies import HostCopies
from asyncrl.tensors.snapshot import HostBucket, Kept, Snapshot

CPU = torch.device("cpu")


def until_update(source: Any, *shape: int) -> Kept:
    return Kept(shape=shape, dtype=torch.bfloat16, device=CPU, source=source, until_update=True)


def test_a_copy_has_the_bytes_of_its_moment() -> None:
    """Tensors as they are, in another dtype, of mixed rows, and made when they are needed, next to gathered ones."""
    plain, wide, made = torch.randn(5, 7).bfloat16(), torch.randn(4, 6), torch.randn(3, 2).bfloat16()
    gathered, frozen = torch.randn(2, 3).bfloat16(), torch.randn(2, 2).bfloat16()
    expected = {
        "plain": plain.clone(),
        "wide": wide.T.bfloat16(),
        "made": made.clone(),
        "gathered": gathered.clone(),
        "frozen": frozen,
    }
    given = [
        ("plain", until_update(plain, 5, 7)),
        ("wide", until_update(wide.T, 6, 4)),
        ("made", until_update(lambda into: into.copy_(made), 3, 2)),
        ("gathered", gathered),
        ("frozen", Kept(shape=(2, 2), dtype=torch.bfloat16, device=CPU, source=frozen)),
    ]
    snapshot = Snapshot.from_tensors(given, to_host=HostCopies(CPU).copy, bucket_bytes=100)
    for one in (plain, wide, made, gathered):
        one.zero_()
    for found in (snapshot, snapshot.cut(30)):
        assert {name: torch.equal(tensor, expected[name]) for name, tensor in found.tensors()} == dict.fromkeys(
            expected, True
        )
        sent = {name: one.clone() for bucket in found.buckets for name, one in bucket.filled().tensors()}
        assert all(torch.equal(sent[name], expected[name]) for name in expected)
    on_host = {e.name for bucket in snapshot.buckets if isinstance(bucket, HostBucket) for e in bucket.entries}
    assert on_host == expected.keys() - {"frozen"}


class Stream:
    """Records on one list what each stream waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.log.append(f"{self.name} has copied")
        return Event("the copy", self.log)


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


def test_only_the_update_and_readers_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = [Stream("the step", log)]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, empty=torch.empty, **as_: empty(*size, **as_))
    copies = HostCopies(CPU)
    copies._stream = Stream("the copier", log)  # type: ignore[assignment]
    bucket = Snapshot.from_tensors([("a", until_update(torch.ones(2), 2))], to_host=copies.copy).buckets[0]
    assert isinstance(bucket, HostBucket)
    assert log == ["the copier waits for the step", "the copier has copied"]
    log.clear()
    with on(Stream("the ring", log)):
        bucket.filled()
    bucket.on_host()
    copies.fence()
    assert log == ["the ring waits for the copy", "the host waits for the copy", "the step waits for the copier"]
