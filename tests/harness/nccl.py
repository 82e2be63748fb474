"""An engine's end of a transfer: a process that joins the group as SGLang does.

A test kills the process to kill the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import Bucket, TensorEntry
from asyncrl.weights.nccl import Sender, group_of_part
from tests.harness.transfers import collective_of

PATIENCE = 30.0
"""Limit in seconds for every answer in these tests; the sender's limits are far below."""


def serve_engine(commands: Connection, devices: Sequence[str]) -> None:
    """Process target: join groups and receive buckets on request, each on the device of its part."""
    groups: dict[str, Any] = {}
    while True:
        kind, part, name, *arguments = commands.recv()
        device = devices[part % len(devices)]
        try:
            if device != "cpu":
                torch.cuda.set_device(device)
            if kind == "join":
                groups[name] = join_group(name, *arguments)
                commands.send(b"joined")
            else:
                commands.send(take_bucket(groups[name], *arguments, device=device))
        except RuntimeError as error:
            commands.send(error)


def join_group(name: str, host: str, port: int, collective: str, *, rank: int = 1, size: int = 2) -> Any:
    """Join as an SGLang scheduler does."""
    limit = timedelta(seconds=PATIENCE)
    store, rank, size = next(dist.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=limit))
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(collective),
        c10d.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def take_bucket(group: Any, layout: BucketLayout, *, device: str) -> bytes:
    entries = tuple(
        TensorEntry(name=name, dtype=getattr(torch, dtype), shape=shape)
        for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True)
    )
    data = torch.zeros(sum(entry.num_bytes for entry in entries), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0, group=group)
    assert all(tensor.numel() for _, tensor in Bucket(entries=entries, data=data).tensors())
    return data.cpu().numpy().tobytes()


class Peer:
    """An engine: one process that holds its weights.

    devices   device of each part that a rank of the learner sends; repeated if there are more parts
    """

    def __init__(self, engine: str = "w0", group: str = "", *, devices: Sequence[str] = ("cpu",)) -> None:
        context: Any = multiprocessing.get_context("forkserver" if set(devices) == {"cpu"} else "spawn")
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=serve_engine, args=(theirs, devices), daemon=True)
        self._process.start()
        theirs.close()
        self.request = TransferRequest(engine=engine, group=group or f"{engine}-{self._process.pid}", num_ranks=1)
        self._threads = ThreadPoolExecutor(1)

    @property
    def joined(self) -> TransferRequest:
        return replace(self.request, has_joined=True)

    def join(self, offer: TransferOffer) -> Future[bytes]:
        """Join every rank of the learner that has a part, one after the other."""
        own = collective_of(offer)
        return [
            self._told("join", number, self._group(number), found.host, found.port, found.collective)
            for number, found in enumerate((own, *own.others))
        ][-1]

    def take(self, layout: BucketLayout, *, part: int = 0) -> Future[bytes]:
        return self._told("take", part, self._group(part), layout)

    def meet(self, sender: Sender) -> None:
        transfer = sender.begin(self.request)
        joining = self.join(transfer.offer)
        transfer.send()
        joining.result(PATIENCE)

    def receive(self, sender: Sender) -> list[bytes]:
        """Return the bytes of every bucket."""
        transfer = sender.begin(self.joined)
        own = collective_of(transfer.offer)
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(transfer.send)
            buckets = [
                self.take(layout, part=number).result(PATIENCE)
                for number, part in enumerate((own, *own.others))
                for layout in part.buckets
            ]
            sending.result(PATIENCE)
        return buckets

    def _group(self, part: int) -> str:
        return group_of_part(self.request.group, part)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def freeze(self) -> None:
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        self.kill()
        self._threads.shutdown()
        self._commands.close()

    def _told(self, *command: Any) -> Future[bytes]:
        def tell() -> bytes:
            self._commands.send(command)
            try:
                answer: bytes | RuntimeError = self._commands.recv()
            except (EOFError, ConnectionResetError):
                return b""  # it died in the meantime
            if isinstance(answer, RuntimeError):
                raise answer
            return answer

        return self._threads.submit(tell)
