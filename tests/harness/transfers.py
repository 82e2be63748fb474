"""A tiny model's weights as the learner holds them and as it offers them to an engine, and both ends' meeting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import safetensors.torch

from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer
from asyncrl.protocols import Engine
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.collective import CollectiveOffer, CollectiveReceiver
from tests.harness.engines import Model

BUCKET_BYTES = 20_000
"""Of the tiny model's weights: some buckets of several tensors each."""


def snapshot(model: Model) -> Snapshot:
    tensors = safetensors.torch.load_file(model.folder / "model.safetensors")
    return Snapshot.of(tensors.items(), bucket_bytes=BUCKET_BYTES)


def layouts(model: Model) -> tuple[BucketLayout, ...]:
    return tuple(
        BucketLayout(
            names=tuple(entry.name for entry in bucket.entries),
            dtypes=tuple(str(entry.dtype).removeprefix("torch.") for entry in bucket.entries),
            shapes=tuple(entry.shape for entry in bucket.entries),
        )
        for bucket in snapshot(model).buckets
    )


def collective_of(offer: TransferOffer) -> CollectiveOffer:
    """What the offer of an nccl channel says."""
    return decode(offer.payload, CollectiveOffer)


def changed(offer: TransferOffer, **fields: Any) -> TransferOffer:
    """``offer`` with other fields in its payload."""
    return replace(offer, payload=encode(replace(collective_of(offer), **fields)))


def receiver_of(engine: Engine, name: str = "w0") -> CollectiveReceiver:
    """The end of an nccl channel at an engine that was started."""
    assert engine.intake is not None and engine.intake.collectives is not None
    return CollectiveReceiver(engine.intake.collectives, engine=name, num_ranks=engine.intake.num_ranks)
