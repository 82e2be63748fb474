"""Weights that an engine copies from the learner's memory: both are on one machine, and the engine sees that memory.

On a GPU that they share, the engine maps the learner's memory (CUDA IPC) and copies it on the device. On the CPU the
memory is a file without a name, which the engine opens under /proc. NCCL cannot connect two processes on one GPU.

    worker -- request --> learner       begin: shares the snapshot, and listens
    worker <--- offer --- learner       handles of the memory, and the address of a socket
    worker connects, and is let in; its engine maps and copies (take_shared); worker says so and disconnects
                          learner       Transfer.send returns: the memory may be used again

Invariants (tests/unit/weights/test_ipc.py):
  C1 memory that an engine may still read is kept until its worker has disconnected, whichever way that happens. After
     too long a time its files end, so that it fails; a GPU's memory stays until the engine lets go of it.
  C2 no transfer leaves memory behind, neither one that ends well nor one whose worker never comes, or dies. Torch frees
     shared memory when its counter, unsigned and 1 at first, is exactly 0: the engine counts it down, or we do, never
     both. So every rank of an engine has a handle of its own, with its own counter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.errors import MessageError, WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.bucket_layout import entries_of, layout_of
from asyncrl.weights.port import Ask, LoadReport, Transfer, WeightUpdater
from asyncrl.weights.ring import Ring

_CONNECT_SECONDS: Final = 30.0
"""Time for a worker to connect after our offer; it waits only for its turn to load."""
_SLOWEST_BYTES_PER_SECOND: Final = 2e8
_PATIENCE_SECONDS: Final = 120.0
_COME_IN: Final = b"\1"
"""What the learner says first; who finds the connection's end instead came too late."""
_TAKEN: Final = b"\1"
"""What the worker says last, once its engine has copied everything."""
_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHandle:
    """What another process needs to map a storage of ours: torch's own handle of it (UntypedStorage._share_cuda_)."""

    gpu: str
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBucket:
    """A bucket in the learner's memory: on a GPU, with a handle for each rank of the engine, or in a file."""

    layout: BucketLayout
    gpu: tuple[GpuHandle, ...] = ()
    start: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IPCRequest:
    """Payload of a request.

    space  machine and PID namespace of the worker
    gpus   CUDA_VISIBLE_DEVICES of the worker and its engine; empty: all
    """

    space: str = ""
    gpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IPCOffer:
    """Payload of an offer.  address: Unix socket that the worker holds open while its engine reads"""

    address: str
    buckets: tuple[SharedBucket, ...]


def begin(
    request: TransferRequest, snapshot: Snapshot, *, ring: Ring, incarnation: int, policy_version: int
) -> Transfer:
    """Accept the request of an engine that can map our memory. Raises WeightsError for any other (Sender.begin)."""
    _check_reach(request, snapshot)
    if not request.has_joined:
        offer = TransferOffer(incarnation=incarnation, policy_version=policy_version)
        return Transfer(offer=offer, send=lambda: None)
    handover = _Handover(snapshot, ring, num_ranks=request.num_ranks)
    offer = TransferOffer(incarnation=incarnation, policy_version=policy_version, payload=encode(handover.offer))
    return Transfer(offer=offer, send=handover.run)


class _Handover:
    """One transfer: owns the memory, files and socket until the worker has disconnected.

    The engine maps all buckets at once, so on a GPU kept buckets take memory while they are handed over.
    """

    def __init__(self, snapshot: Snapshot, ring: Ring, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._on_gpu: list[Bucket] = []
        self._num_bytes = snapshot.num_bytes
        self._handles: list[GpuHandle] = []
        self._ends = contextlib.ExitStack()
        try:
            folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-weights-")))
            address = str(folder / "socket")
            self._listener = self._ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(address)
            self._listener.listen(1)
            with ring.beside_steps(snapshot.device) as stream:
                buckets = [self._share(bucket.filled()) for bucket in snapshot.buckets]
            if stream is not None:
                stream.synchronize()
        except (OSError, RuntimeError) as error:  # no memory, no free descriptor, or CUDA refuses
            self._ends.close()
            self._let_go()
            self._on_gpu.clear()
            raise WeightsError(f"the learner cannot share its weights: {error}") from error
        self.offer = IPCOffer(address=address, buckets=tuple(buckets))

    def _share(self, bucket: Bucket) -> SharedBucket:
        layout = layout_of(bucket)
        if bucket.data.is_cuda:
            self._on_gpu.append(bucket)
            handles = tuple(_gpu_memory(bucket.data) for _ in range(self._num_ranks))
            self._handles += handles
            return SharedBucket(layout=layout, gpu=handles, start=int(bucket.data.storage_offset()))
        # It ends with this process, and a container's small /dev/shm is no limit.
        stream = self._ends.enter_context(os.fdopen(os.memfd_create("asyncrl-weights"), "wb"))
        stream.write(memoryview(bucket.data.numpy()))  # type: ignore[arg-type]
        stream.flush()
        return SharedBucket(layout=layout, file=f"/proc/{os.getpid()}/fd/{stream.fileno()}")

    def run(self) -> None:
        """Block until the worker has disconnected. Raises WeightsError if it never connects or stays for too long."""
        is_reading = has_taken = False
        try:
            with self._ends:
                self._listener.settimeout(_CONNECT_SECONDS)
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_PATIENCE_SECONDS + self._num_bytes / _SLOWEST_BYTES_PER_SECOND)
                    with contextlib.suppress(ConnectionError):  # its process is gone
                        connection.sendall(_COME_IN)
                        is_reading = True
                        last = bytearray(len(_TAKEN))
                        connection.recv_into(last)  # nothing, if the other end was closed
                        has_taken = last == _TAKEN
                    is_reading = False
        except TimeoutError:
            raise WeightsError("the engine did not take its weights in time") from None
        except OSError as error:
            raise WeightsError(f"the connection of the transfer failed: {error}") from error
        finally:
            if not is_reading and not has_taken:
                self._let_go()
            self._on_gpu.clear()

    def _let_go(self) -> None:
        """Count down for an engine that has mapped nothing, or died; one that has taken all has counted down itself."""
        storage_type: Any = torch.UntypedStorage
        for handle in self._handles:
            storage_type._release_ipc_counter_cuda(handle.counter, handle.counter_offset)


def _check_reach(request: TransferRequest, snapshot: Snapshot) -> None:
    """Raise WeightsError if the engine cannot map our memory."""
    try:
        asks = decode(request.payload, IPCRequest)
    except MessageError as error:
        raise WeightsError(f"the request of engine {request.engine} cannot be read: {error}") from error
    if snapshot.others:
        raise WeightsError("several ranks of the learner hold parts of the model")
    if asks.space != process_space():
        raise WeightsError(f"{request.engine} is on another machine, or in another container, than the learner")
    device = snapshot.device
    if device.type == "cuda" and any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR):
        raise WeightsError(f"expandable segments ({_ALLOCATOR[0]}) cannot be mapped by another process")
    if device.type == "cuda" and asks.gpus and (ours := _name_of_gpu(device.index)) not in asks.gpus.split(","):
        raise WeightsError(f"{request.engine} sees GPU {asks.gpus} alone, and the weights are on GPU {ours}")


def _name_of_gpu(index: int) -> str:
    """Return the name of our GPU ``index`` in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def _gpu_memory(data: torch.Tensor) -> GpuHandle:
    storage: Any = data.untyped_storage()
    _, handle, num_bytes, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return GpuHandle(
        gpu=str(torch.cuda.get_device_properties(data.device).uuid),
        handle=handle,
        num_bytes=num_bytes,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits_for_event=waits,
    )


class IPCReceiver:
    """See Receiver in weights/port.py. Nothing is kept between two transfers."""

    def __init__(self, updater: WeightUpdater, *, engine: str) -> None:
        """``engine``: name of the engine in the run."""
        self._updater = updater
        self._engine = engine

    async def join(self, ask: Ask) -> None:
        """Ask whether the learner's memory is in reach."""
        await ask(self._request(has_joined=False))

    async def receive(self, ask: Ask) -> LoadReport:
        offer = await ask(self._request(has_joined=True))
        try:
            shared = decode(offer.payload, IPCOffer)
            learner, connection = await asyncio.open_unix_connection(shared.address)
        except (MessageError, OSError) as error:
            raise WeightsError(f"cannot take the learner's weights: {error}") from error
        with contextlib.closing(connection):
            try:
                await learner.readexactly(len(_COME_IN))
            except (OSError, EOFError):
                raise WeightsError("cannot take the learner's weights: it has given this transfer up") from None
            # A server that cannot open one dies. /proc may be closed to us, by capabilities of the learner's Python.
            if closed := next(
                (one.file for one in shared.buckets if one.file and not os.access(one.file, os.R_OK)), ""
            ):
                raise WeightsError(f"cannot take the learner's weights: {closed} cannot be opened")
            report = await self._updater.update(offer.version, take_shared, offer.payload)
            with contextlib.suppress(OSError):  # the learner is gone
                connection.write(_TAKEN)
                await connection.drain()
            return report

    def _request(self, *, has_joined: bool) -> TransferRequest:
        asks = IPCRequest(space=process_space(), gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return TransferRequest(
            engine=self._engine,
            group=self._engine,
            num_ranks=self._updater.num_ranks,
            has_joined=has_joined,
            payload=encode(asks),
        )


# -- in the engine's process -------------------------------------------------------------------------------------------


def take_shared(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the tensors that a payload (IPCOffer) describes.  See Source in weights/port.py."""
    for shared in decode(payload, IPCOffer).buckets:
        data = _map_gpu(shared, shared.gpu[_rank()]) if shared.gpu else _map_file(shared.file)
        for name, tensor in Bucket(entries=entries_of(shared.layout), data=data).tensors():
            yield name, tensor.to(device, copy=True)
        if data.is_cuda:  # the copies must end before the learner may use this memory again
            torch.cuda.current_stream(data.device).synchronize()
        del data


def _map_file(file: str) -> torch.Tensor:
    if not os.stat(file).st_size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))  # copy-on-write: torch wants writable memory


def _rank() -> int:
    """Return which rank of its engine this process is."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _map_gpu(shared: SharedBucket, memory: GpuHandle) -> torch.Tensor:
    index = next((number for number in range(torch.cuda.device_count()) if _uuid(number) == memory.gpu), None)
    if index is None:
        raise WeightsError(f"the learner's weights are on GPU {memory.gpu}, which this process does not see")
    storage_type: Any = torch.UntypedStorage
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = storage_type._new_shared_cuda(
        index,
        memory.handle,
        memory.num_bytes,
        memory.offset,
        memory.counter,
        memory.counter_offset,
        memory.event,
        memory.waits_for_event,
    )
    mapped = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
    num_bytes = sum(entry.num_bytes for entry in entries_of(shared.layout))
    return mapped.set_(storage, shared.start, (num_bytes,))  # type: ignore[call-overload, no-any-return]


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
