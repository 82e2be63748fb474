"""A tiny model's weights as the learner holds and offers them to an engine, and both ends of the transfer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from asyncrl.engines.port import Engine
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights import ipc
from asyncrl.weights.bucket_layout import layout_of
from asyncrl.weights.ipc import IPCOffer, IPCRequest
from asyncrl.weights.nccl import CollectiveOffer
from asyncrl.weights.nccl_channel import CollectiveReceiver
from asyncrl.weights.port import Ask, BroadcastUpdater, LoadReport, Receiver, Sender
from tests.harness.engines import Model

BUCKET_BYTES = 20_000
"""Bucket size for the tiny model's weights: gives some buckets of several tensors each."""


def snapshot(model: Model) -> Snapshot:
    tensors = safetensors.torch.load_file(model.folder / "model.safetensors")
    return Snapshot.from_tensors(tensors.items(), bucket_bytes=BUCKET_BYTES)


def layouts(model: Model) -> tuple[BucketLayout, ...]:
    return tuple(map(layout_of, snapshot(model).buckets))


def collective_of(offer: TransferOffer) -> CollectiveOffer:
    """Return the payload of an nccl channel's offer."""
    return decode(offer.payload, CollectiveOffer)


def changed(offer: TransferOffer, **fields: Any) -> TransferOffer:
    """Return ``offer`` with other fields in its payload."""
    return replace(offer, payload=encode(replace(collective_of(offer), **fields)))


def offering(offer: TransferOffer) -> Ask:
    """Return an ``ask`` that is answered with this offer, while nothing is sent."""

    async def ask(request: TransferRequest) -> TransferOffer:
        return offer

    return ask


async def join(receiver: Receiver, sender: Sender) -> None:
    """Let a receiver meet a sender, as WeightFollower and WeightSender do."""
    async with asyncio.TaskGroup() as group:
        await receiver.join(_ask(sender, group))


async def receive(receiver: Receiver, sender: Sender) -> LoadReport:
    """Let a receiver receive what a sender holds."""
    async with asyncio.TaskGroup() as group:
        return await receiver.receive(_ask(sender, group))


def _ask(sender: Sender, group: asyncio.TaskGroup) -> Ask:
    async def ask(request: TransferRequest) -> TransferOffer:
        transfer = sender.begin(request)
        group.create_task(asyncio.to_thread(transfer.send))
        return transfer.offer

    return ask


def copied(sender: Sender) -> dict[str, torch.Tensor]:
    """Return what an engine copies from the learner's memory while its worker holds a socket of every rank."""
    asks = encode(IPCRequest(space=process_space()))
    transfer = sender.begin(TransferRequest(engine="w0", group="w0", num_ranks=1, has_joined=True, payload=asks))
    offer = decode(transfer.offer.payload, IPCOffer)
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as connected:
        sending = thread.submit(transfer.send)
        workers = [connected.enter_context(socket.socket(socket.AF_UNIX)) for _ in offer.parts]
        for worker, part in zip(workers, offer.parts, strict=True):
            worker.connect(part.address)
            assert worker.recv(1)
        found = dict(ipc.take_shared(transfer.offer.payload, torch.device("cpu")))
        for worker in workers:
            worker.send(ipc._TAKEN)
        sending.result()
    assert not any(Path(bucket.file).exists() for bucket in offer.all_buckets)
    return found


def receiver_of(engine: Engine, name: str = "w0") -> CollectiveReceiver:
    """Return a started engine's end of an nccl channel."""
    assert isinstance(engine.weight_updater, BroadcastUpdater)
    return CollectiveReceiver(engine.weight_updater, engine=name)
