"""Weight loader that runs inside an SGLang server launched by us. Reads a file with many threads, a channel, or groups.

SGLang's own loader reads a memory map tensor by tensor, on one thread and through unpinned memory. It reaches 5 GB/s
from ``/dev/shm``, and the engine generates nothing in that time. Here several threads read pieces of the file into
pinned memory and copy them to the GPU, each on its own stream, while the model loads the tensors read before
(docs/results/performance.md).

The server finds ``load`` through --custom-weight-loader. A request to /update_weights_from_tensor carries the result of
a ``serialize_`` function where SGLang expects tensors: the file names, the channel's function and its payload, or the
buckets of each NCCL group (receiving.py).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.config import plugins
from asyncrl.engines.sglang import receiving
from asyncrl.engines.sglang.destinations import Destinations
from asyncrl.errors import ConfigError
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.model_tensors import Shapes, check_layout
from asyncrl.tensors.snapshot import Bucket, grouped
from asyncrl.weights.port import Source

_SOURCE: Final = "source:"
_GROUPS: Final = "groups"
_THREADS: Final = 8
_PIECE_BYTES: Final = 32 * 2**20
"""Bytes that one thread reads and copies at a time. Each thread keeps a pinned buffer of this size."""
_BUCKET_BYTES: Final = 512 * 2**20
"""Up to three buckets (or larger tensors) are on the GPU besides the weights: the one being read, the one being loaded,
and the previous one, whose last tensor the model's loop still holds. A model that collects all tensors before loading
holds all of them."""


def serialize_files(*files: Sequence[Path]) -> str:
    """Encode weight files like SGLang's (name, tensor) pairs. Each file is a list of paths, tried in order.

    The server uses the first path that it can read. A file that another process has open (/proc/PID/fd) is not always
    readable: file capabilities and security modules may forbid it.
    """
    return _encode_names(*(json.dumps([str(name) for name in names]) for names in files))


def serialize_source(source: Source, payload: bytes, *, expected: Shapes, optional: frozenset[str]) -> str:
    """Encode an instruction to load the tensors that ``source`` yields for ``payload``.

    They must be the ``expected`` ones; the ``optional`` ones may be absent. Raises ConfigError for a function that is
    not at the top of its module: the server could not import it, and would die.
    """
    if "." in source.__qualname__:
        raise ConfigError(f"weights.channel: {source.__module__}.{source.__qualname__} is not at the top of its module")
    address = f"{source.__module__}:{source.__qualname__}"
    layout = {"shapes": {name: list(shape) for name, shape in expected.items()}, "optional": sorted(optional)}
    return _encode_names(_SOURCE + address, base64.b64encode(payload).decode(), json.dumps(layout))


def serialize_groups(parts: receiving.Parts, *, problem: Path) -> str:
    """Encode an instruction to receive the buckets of each group, which the server has joined.

    If the server finds no such group, it changes nothing and writes the reason to the new file ``problem``.
    """
    return _encode_names(_GROUPS, receiving.describe_parts(parts), str(problem))


def _encode_names(*names: str) -> str:
    written = io.BytesIO()
    _Pickler(written).dump([(name, torch.empty(0)) for name in names])
    return base64.b64encode(written.getvalue()).decode()


class _Pickler(pickle.Pickler):
    """Refers to no class but torch.Tensor. Megatron-Core replaces a function that pickles torch tensors with its own,
    and a server refuses anything that does not belong to torch."""

    def reducer_override(self, made: object) -> Any:
        return (torch.Tensor, ()) if isinstance(made, torch.Tensor) else NotImplemented


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load weights. SGLang calls this in every rank. An error kills the server: its weights may be partly loaded."""
    names = [name for name, _ in named_tensors]
    device = next(model.parameters()).device
    arriving = receiving.arrivals(names[1], Path(names[2]), device) if names[0] == _GROUPS else None
    if names[0] == _GROUPS and arriving is None:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the last step of a paused server may still run on another stream
    with _unpacked(model), _destinations.setdefault(model, Destinations()).loading(model) as target:
        if arriving is not None:
            arriving.load_into(target)
        else:
            target.load_weights(
                _from_source(names, device) if names[0].startswith(_SOURCE) else _from_files(names, device)
            )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextlib.contextmanager
def _unpacked(model: torch.nn.Module) -> Iterator[None]:
    """Give experts in 4 bits the shapes of the folder's tensors; afterwards repack them for Marlin's kernels.

    SGLang repacks them when it starts. It has the way back (compressed_tensors_wNa16_moe.py), but 0.5.16 never takes
    it; 0.5.23 takes it at the begin of a session, where both steps here do no harm. Parameters and workspaces stay the
    same objects in the same memory, which CUDA graphs read: SGLang repacks in place, but makes new workspaces
    (test_repacked_experts_are_loaded_again_into_the_memory_that_graphs_read).
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "is_marlin_converted")]
    kept = [(layer, dict(layer._parameters), layer.workspace) for layer in layers]
    for layer in layers:
        layer.scheme.restore_weights_before_loading(layer)
    yield
    for layer, parameters, workspace in kept:
        layer.scheme.process_weights_after_loading(layer)
        for name, old in parameters.items():
            made = layer._parameters[name]
            if made is not old:
                old.data.copy_(made.data)
                layer._parameters[name] = old
        layer.workspace = workspace


def _from_files(files: Sequence[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for names in map(json.loads, files):
        yield from tensors(Path(next((name for name in names if os.access(name, os.R_OK)), names[-1])), device)


def _from_source(instruction: Sequence[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from the source. At the end, raises WeightsError unless they match the model."""
    address, payload, layout = instruction
    source: Source = plugins.load(address.removeprefix(_SOURCE), where="weights.channel")
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in source(base64.b64decode(payload), device):
        found[name] = tuple(tensor.shape)
        yield name, tensor
    wanted = json.loads(layout)
    expected = {name: tuple(shape) for name, shape in wanted["shapes"].items()}
    check_layout(found, expected=expected, optional=frozenset(wanted["optional"]), where=address)


def tensors(file: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on ``device``) in file order."""
    with file.open("rb") as stream:
        entries, offset = safetensors_file.read_header(stream)
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
    """A bucket that is being read."""

    def __init__(self, descriptor: int, offset: int, bucket: Bucket) -> None:
        self.bucket = bucket
        data = bucket.data
        is_free = None
        if data.is_cuda:  # wait for queued copies from the previous user of this memory
            is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_free.record()
        # A pool's thread keeps its arguments for a moment after the result is known: they must not keep the bucket.
        self._pieces: list[Future[None]] = [
            _threads.submit(_read, descriptor, offset, weakref.ref(data), start, is_free)
            for start in range(0, data.numel(), _PIECE_BYTES)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self._pieces:
            piece.result()
        yield from self.bucket.tensors()


_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-read")
_own = threading.local()
"""The pinned buffer and stream of each thread."""
_destinations = weakref.WeakKeyDictionary[torch.nn.Module, Destinations]()
"""Of each model."""


@torch.inference_mode()  # like the server's own thread, if SGLANG_ENABLE_TORCH_INFERENCE_MODE is set
def _read(
    descriptor: int, offset: int, bucket: weakref.ref[torch.Tensor], start: int, is_free: torch.cuda.Event | None
) -> None:
    """Copy a piece of the file, which has the bucket at ``offset``, into the bucket from ``start`` on; then return.

    ``is_free`` is recorded when no queued GPU work uses the bucket any more; None on the CPU.
    """
    data = bucket()
    assert data is not None  # held by the caller until we are done
    offset, target = offset + start, data[start : start + _PIECE_BYTES]
    if is_free is None:
        _fill(descriptor, offset, target)
        return
    if not hasattr(_own, "pinned"):
        torch.cuda.set_device(target.device)  # otherwise pinning uses GPU 0, which may belong to another rank
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
            raise EOFError(f"the weight file ends at byte {offset}, {len(left)} bytes early")
        left, offset = left[num_bytes:], offset + num_bytes
