"""Memory that a learner and an engine share on one GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights import ipc
from asyncrl.weights.ipc import IPCOffer, IPCRequest
from asyncrl.weights.nccl import Sender
from asyncrl.weights.port import Transfer
from tests.harness.weights import OtherRank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ELEMENTS = 2**20


def take_one(payload: bytes) -> None:
    """An engine that dies after the first of its buckets."""
    offer = decode(payload, IPCOffer)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(offer.address)
        assert connection.recv(1)
        first = encode(replace(offer, buckets=offer.buckets[:1]))
        assert len(list(ipc.take_shared(first, torch.device("cuda", 0)))) == 1


def take(payload: bytes, expected: float, ranks: int, num_gpus: int = 0) -> None:
    """What a worker and its engine's ranks do, in one process.  num_gpus: that the engine must see; 0: any"""
    with contextlib.ExitStack() as connected:
        connections = [connected.enter_context(socket.socket(socket.AF_UNIX)) for _ in decode(payload, IPCOffer).parts]
        for connection, part in zip(connections, decode(payload, IPCOffer).parts, strict=True):
            connection.connect(part.address)
            assert connection.recv(1)
        for rank in range(ranks):
            ipc._rank = lambda rank=rank: rank  # type: ignore[misc]
            for _, tensor in ipc.take_shared(payload, torch.device("cuda", 0)):
                assert bool((tensor == expected).all())
            del tensor
        assert num_gpus in (0, torch.cuda.device_count())
        for connection in connections:
            connection.send(ipc._TAKEN)


def hand_over(transfer: Transfer, engine: Callable[..., None], *arguments: float) -> None:
    """Send to an engine in a process of its own."""
    sending = threading.Thread(target=transfer.send)
    sending.start()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(transfer.offer.payload, *arguments))
    process.start()
    process.join()
    sending.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_version_leaves_memory_behind(ranks: int) -> None:
    request = TransferRequest(
        engine="w0", group="w0", num_ranks=ranks, has_joined=True, payload=encode(IPCRequest(space=process_space()))
    )
    sender, allocated = Sender("127.0.0.1"), list[int]()
    for version in range(3):
        named = [(f"w{number}", torch.full((ELEMENTS,), float(version), device="cuda")) for number in range(2)]
        sender.set_weights(Snapshot.from_tensors(named), incarnation=0, policy_version=version)
        del named
        transfer = sender.begin(request)
        hand_over(transfer, take, version, ranks)
        del transfer
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] == allocated[0], allocated


def test_an_engine_that_dies_between_two_buckets_leaves_no_memory_behind() -> None:
    asks = encode(IPCRequest(space=process_space()))
    request = TransferRequest(engine="w0", group="w0", num_ranks=1, has_joined=True, payload=asks)
    sender, allocated = Sender("127.0.0.1"), list[int]()
    for version in range(3):
        named = [(f"w{number}", torch.full((ELEMENTS,), float(version), device="cuda")) for number in range(2)]
        sender.set_weights(
            Snapshot.from_tensors(named, bucket_bytes=4 * ELEMENTS), incarnation=0, policy_version=version
        )
        del named
        transfer = sender.begin(request)
        assert len(decode(transfer.offer.payload, IPCOffer).buckets) == 2
        hand_over(transfer, take_one)
        del transfer
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] == allocated[0], allocated


@pytest.mark.gpu(2)
def test_an_engine_that_sees_one_gpu_copies_the_parts_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of the learner, in one process here. No version leaves memory behind on either GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    gpu = visible.split(",")[1]
    request = TransferRequest(
        engine="w0",
        group="w0",
        num_ranks=1,
        has_joined=True,
        payload=encode(IPCRequest(space=process_space(), gpus=gpu, takes_broadcasts=True)),
    )
    sender, allocated = Sender("127.0.0.1"), list[tuple[int, int]]()
    for version in range(3):
        own, other = (
            Snapshot.from_tensors([(f"w{device}", torch.full((ELEMENTS,), float(version), device=f"cuda:{device}"))])
            for device in range(2)
        )
        torch.cuda.synchronize(1)
        exported = replace(own, others=(OtherRank(other),))
        del own, other
        sender.set_weights(exported, incarnation=0, policy_version=version)
        del exported
        transfer = sender.begin(request)
        with monkeypatch.context() as environment:
            environment.setenv("CUDA_VISIBLE_DEVICES", gpu)
            hand_over(transfer, take, version, 1, 1)
        del transfer
        allocated.append((torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)))
    assert allocated[2] == allocated[0], allocated
