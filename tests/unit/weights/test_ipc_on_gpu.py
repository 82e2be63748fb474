"""Memory that a learner and an engine share on one GPU."""

from __future__ import annotations

import multiprocessing
import socket
import threading

import pytest
import torch

from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights import ipc
from asyncrl.weights.ipc import IPCOffer, IPCRequest
from asyncrl.weights.nccl import Sender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ELEMENTS = 2**20


def take(payload: bytes, expected: float, ranks: int) -> None:
    """What a worker and its engine's ranks do, in one process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(decode(payload, IPCOffer).address)
        assert connection.recv(1)
        for rank in range(ranks):
            ipc._rank = lambda rank=rank: rank  # type: ignore[misc]
            for _, tensor in ipc.take_shared(payload, torch.device("cuda", 0)):
                assert bool((tensor == expected).all())
            del tensor
        connection.send(ipc._TAKEN)


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
        sending = threading.Thread(target=transfer.send)
        sending.start()
        engine = multiprocessing.get_context("spawn").Process(
            target=take, args=(transfer.offer.payload, version, ranks)
        )
        engine.start()
        engine.join()
        sending.join()
        assert engine.exitcode == 0
        del transfer
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] == allocated[0], allocated
