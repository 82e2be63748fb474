"""What is particular to NCCL on the sender's side: broadcasts that are queued, and the size of their buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import WeightsError
from asyncrl.messages.codec import encode
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.weights import nccl
from asyncrl.weights.nccl import CollectiveRequest, Sender
from asyncrl.weights.port import Transfer
from tests.unit.weights.test_nccl import buckets_of, holding, weights


class Queue:
    """An NCCL process group whose broadcasts end when the sender has looked at them ``looks`` times."""

    def __init__(self, *, looks: int) -> None:
        self._looks = looks
        self._works: list[Work] = []
        self.queued: list[int] = []
        """Broadcasts that have not ended, at the beginning of each."""
        self.is_aborted = False

    def broadcast(self, *_: Any) -> Work:
        self._works.append(Work(self._looks))
        self.queued.append(sum(work.looks > 0 for work in self._works))
        return self._works[-1]

    def abort(self) -> None:
        self.is_aborted = True


class Work:
    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def over_nccl(sender: Sender, queue: Queue) -> Transfer:
    """Begin a transfer of joined engine w0 with a queue in place of NCCL's group."""
    request = TransferRequest(engine="w0", group="w0-1", num_ranks=1)
    sender.begin(request)
    group = sender._own._groups["w0"]
    group._kind, group._collective = "nccl", queue
    group.is_free.release()
    return sender.begin(replace(request, has_joined=True))


def test_queues_few_buckets_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_QUEUED", 3)
    queue = Queue(looks=3)
    over_nccl(holding(weights(0)), queue).send()
    assert queue.queued == [1, 2, 3, 3]


def test_gives_up_engine_that_takes_nothing() -> None:
    queue = Queue(looks=10**9)
    with pytest.raises(WeightsError, match="w0-1: the engine did not take its weights in time"):
        over_nccl(holding(weights(0), patience_seconds=0.2), queue).send()
    assert queue.is_aborted


@pytest.mark.parametrize(("at_once", "buckets"), [(None, [2, 1, 1, 1]), (1, [2, 1, 1, 1]), (2, [1, 1, 1, 1, 1])])
def test_cuts_buckets_for_engines_that_hold_several(
    monkeypatch: pytest.MonkeyPatch, at_once: int | None, buckets: list[int]
) -> None:
    monkeypatch.setattr(nccl, "_kind_of", lambda snapshot: "nccl")
    monkeypatch.setenv(nccl.CUMEM, "0")
    payload = encode(CollectiveRequest(buckets_at_once=at_once)) if at_once else b""
    sender = Sender("127.0.0.1", bucket_bytes=1700)
    sender.set_weights(weights(0), incarnation=0, policy_version=1)
    transfer = sender.begin(TransferRequest(engine="w0", group="w0-1", num_ranks=1, payload=payload))
    assert [len(layout.names) for layout in buckets_of(transfer)] == buckets


def test_keeps_buckets_over_gloo() -> None:
    request = TransferRequest(
        engine="w0", group="w0-1", num_ranks=1, payload=encode(CollectiveRequest(buckets_at_once=2))
    )
    assert [len(layout.names) for layout in buckets_of(holding(weights(0)).begin(request))] == [2, 1, 1, 1]
