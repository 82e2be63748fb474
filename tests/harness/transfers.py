"""A tiny model's weights as the learner holds and offers them to an engine, and both ends of the transfer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import safetensors.torch

from asyncrl.engines.port import Engine
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.bucket_layout import layout_of
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


def receiver_of(engine: Engine, name: str = "w0") -> CollectiveReceiver:
    """Return a started engine's end of an nccl channel."""
    assert isinstance(engine.weight_updater, BroadcastUpdater)
    return CollectiveReceiver(engine.weight_updater, engine=name)
