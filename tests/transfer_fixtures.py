"""A tiny model's weights as the learner holds them, and as it offers them to an engine."""

from __future__ import annotations

import safetensors.torch

from asyncrl.snapshot import Snapshot
from asyncrl.transfer_messages import BucketLayout
from tests.engine_fixtures import Model

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
