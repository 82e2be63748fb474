"""The tensors of a bucket as a message, and back."""

from __future__ import annotations

import torch

from asyncrl.messages.weight_transfer import BucketLayout
from asyncrl.tensors.snapshot import AnyBucket, TensorEntry


def layout_of(bucket: AnyBucket) -> BucketLayout:
    return BucketLayout(
        names=tuple(entry.name for entry in bucket.entries),
        dtypes=tuple(str(entry.dtype).removeprefix("torch.") for entry in bucket.entries),
        shapes=tuple(entry.shape for entry in bucket.entries),
    )


def entries_of(layout: BucketLayout) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(name=name, dtype=getattr(torch, dtype), shape=tuple(shape))
        for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True)
    )
