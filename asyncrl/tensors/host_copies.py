"""Copies of an export in host memory, made by a stream of their own while the next step computes.

The device keeps no second copy of the weights, and neither the host nor the step waits: only the next update, which
would change what is still being read, waits on the device (``fence``). Engines get the copy through a ring of blocks on
the device (weights/ring.py), at the speed of the bus between host and device.
Tests: tests/unit/tensors/test_host_copies.py, tests/unit/backends/megatron/test_host_exports.py.
"""

from __future__ import annotations

from typing import Final

import torch

from asyncrl.tensors.snapshot import Bucket, HostBucket, KeptBucket

BUCKET_BYTES: Final = 2**29
"""Of a bucket of copies; one of gathered tensors is on the device while it is copied, and the one before it may be."""


class HostCopies:
    """Copies buckets from ``device``. torch keeps the pinned memory of copies that are gone for later ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._gathered: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, bucket: Bucket | KeptBucket) -> HostBucket:
        """Begin to copy a bucket as it is after all queued work. What it is made of must stay until ``fence``."""
        stream = self._stream
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=stream is not None)
        if isinstance(bucket, Bucket) and self._gathered is not None:
            self._gathered.synchronize()  # else the device might hold all of them at once
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if isinstance(bucket, Bucket):
                data.copy_(bucket.data, non_blocking=True)
            else:
                _fill(Bucket(entries=bucket.entries, data=data), bucket)
            done = None if stream is None else stream.record_event()
        if isinstance(bucket, Bucket) and stream is not None:
            bucket.data.record_stream(stream)
            self._gathered = done
        return HostBucket(entries=bucket.entries, data=data, device=self._device, done=done)

    def fence(self) -> None:
        """Let what the device does next wait for copies that have begun."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _fill(into: Bucket, bucket: KeptBucket) -> None:
    """Copy tensors straight to the host; those that must be made pass through memory of the current stream."""
    for (_, view), source in zip(into.tensors(), bucket.sources, strict=True):
        made = source
        if callable(source):
            made = torch.empty(view.shape, dtype=view.dtype, device=bucket.device)
            source(made)
        assert isinstance(made, torch.Tensor)
        view.copy_(made, non_blocking=True)
