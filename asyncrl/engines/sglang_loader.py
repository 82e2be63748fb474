"""Weights from a file into the model of an SGLang server that we launched, by many threads: runs inside that server.

SGLang's own way goes through a memory map tensor by tensor, on one thread and through memory that is not pinned: 5 GB/s
from ``/dev/shm``, in which an engine generates nothing. Here threads read pieces of the file into pinned memory and
copy them to the GPU, each on a stream of its own, while the model takes the tensors read before (docs/performance.md).

The server knows ``load`` by --custom-weight-loader; ``serialized`` is what an order to /update_weights_from_tensor
carries for it: the file's name where SGLang expects tensors.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from asyncrl import safetensors_file
from asyncrl.snapshot import Bucket, grouped

_THREADS: Final = 8
_PIECE_BYTES: Final = 32 * 2**20
"""Read and copied at once by one thread. Each of them keeps so much pinned memory from its first piece on."""
_BUCKET_BYTES: Final = 512 * 2**20
"""On the GPU beside the weights are up to three buckets, or tensors that are larger: one is read, one is taken, and of
the one before the model's loop holds the last tensor. A model that collects all tensors before it takes any has all."""


def serialized(*names: Path) -> str:
    """``names`` of one file, of which the server reads the first that it can, as SGLang encodes (name, tensor) pairs.

    What is open in another process is not there for everybody: file capabilities and security modules forbid it.
    """
    return base64.b64encode(pickle.dumps([(str(name), torch.empty(0)) for name in names])).decode()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in every rank of the server. An error here ends the server: the weights may be torn."""
    file = next((name for name, _ in named_tensors if os.access(name, os.R_OK)), named_tensors[-1][0])
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a paused server's last step may be running, on a stream of its own
    model.load_weights(tensors(Path(file), device))  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def tensors(file: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on ``device``) in the file's order."""
    with file.open("rb") as stream:
        entries, offset = safetensors_file.entries_of(stream)
        reading: _Reading | None = None
        for group in grouped(entries, _BUCKET_BYTES):
            following = _Reading(stream.fileno(), offset, Bucket.empty(group, device))
            offset += following.bucket.data.numel()
            if reading is not None:
                yield from reading.tensors()
            reading = following
        if reading is not None:
            yield from reading.tensors()


class _Reading:
    """One bucket while it is read."""

    def __init__(self, descriptor: int, offset: int, bucket: Bucket) -> None:
        self.bucket = bucket
        data = bucket.data
        is_free = None
        if data.is_cuda:  # copies that the model queued from whatever had this memory before come first
            is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_free.record()
        self._pieces: list[Future[None]] = [
            _threads.submit(_read, descriptor, offset + start, data[start : start + _PIECE_BYTES], is_free)
            for start in range(0, data.numel(), _PIECE_BYTES)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self._pieces:
            piece.result()
        yield from self.bucket.tensors()


_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-read")
_own = threading.local()
"""Of each thread: its pinned memory and its stream."""


@torch.inference_mode()  # as the server's own thread may be (SGLANG_ENABLE_TORCH_INFERENCE_MODE)
def _read(descriptor: int, offset: int, target: torch.Tensor, is_free: torch.cuda.Event | None) -> None:
    """Bytes of the file from ``offset`` on into ``target``, there when this returns.

    ``is_free``: of memory on a GPU, when nothing queued uses it any more; None on the CPU.
    """
    if is_free is None:
        _fill(descriptor, offset, target)
        return
    if not hasattr(_own, "pinned"):
        torch.cuda.set_device(target.device)  # else memory is pinned by way of GPU 0, which may be another rank's
        _own.pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        _own.stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
    pinned = _own.pinned[: target.numel()]
    _fill(descriptor, offset, pinned)
    with torch.cuda.stream(_own.stream):
        _own.stream.wait_event(is_free)
        target.copy_(pinned, non_blocking=True)
    _own.stream.synchronize()


def _fill(descriptor: int, offset: int, target: torch.Tensor) -> None:
    left = memoryview(target.numpy())  # type: ignore[arg-type]
    while left:
        num_bytes = os.preadv(descriptor, [left], offset)
        if not num_bytes:
            raise EOFError(f"the weights' file ends at byte {offset}, {len(left)} bytes early")
        left, offset = left[num_bytes:], offset + num_bytes
