"""Weights that an engine copies from the learner's memory: both are on one machine, and share a GPU.

The engine maps the learner's memory (CUDA IPC) and copies it on the device. On the CPU the memory is a file without a
name, which the engine opens under /proc. NCCL cannot connect two processes on one GPU.

Each rank of the learner that has a part of the model shares it from its own memory, so nobody gathers the model. What
lies on another GPU than the engine's is mapped into the engine's: the GPUs reach each other's memory, and the engine
need not see the other GPU (CUDA maps memory of devices that CUDA_VISIBLE_DEVICES hides), nor has a context there.

    worker -- request --> learner       begin: each rank shares its part, and listens
    worker <--- offer --- learner       per rank: handles of the memory, and the address of a socket
    worker connects to all, and is let in; its engine maps and copies (take_shared); worker says so and disconnects
                          learner       Transfer.send returns: the memory may be used again

Invariants (tests/unit/weights/test_ipc.py):
  C1 memory that an engine may still read is kept until its worker has disconnected, whichever way that happens. After
     too long a time its files end, so that it fails; a GPU's memory stays until the engine lets go of it.
  C2 no transfer leaves memory behind: one that ends well, one whose worker never comes, or dies, or whose engine fails
     between two buckets. Torch frees shared memory when its counter, unsigned and 1 at first, is exactly 0: the engine
     counts it down, or we do, never both. So every rank of an engine has a handle of its own, with its own counter,
     which we read first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.errors import AsyncRLError, MessageError, WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.os_process import process_space
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.bucket_layout import entries_of, layout_of
from asyncrl.weights.port import Ask, BroadcastUpdater, LoadReport, Transfer, WeightUpdater
from asyncrl.weights.ring import Ring

_CONNECT_SECONDS: Final = 30.0
"""Time for a worker to connect after our offer; it waits only for its turn to load."""
SLOWEST_BYTES_PER_SECOND: Final = 2e8
"""Slowest transfer rate that is tolerated. A fixed time is allowed on top."""
_PATIENCE_SECONDS: Final = 120.0
_COME_IN: Final = b"\1"
"""What the learner says first; who finds the connection's end instead came too late."""
_TAKEN: Final = b"\1"
"""What the worker says last, once its engine has copied everything."""
_PIECE_BYTES: Final = 32 * 2**20
"""Bytes that an engine copies at a time, or one larger tensor. Until they are loaded they take memory beside the
weights."""
_COUNTERS_HEADER: Final = 64
"""Bytes before the counters in torch's file."""
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

    space             machine and PID namespace of the worker
    gpus              CUDA_VISIBLE_DEVICES of the worker and its engine; empty: all
    takes_broadcasts  whether the engine can join a process group instead, which is faster from one GPU to another
    """

    space: str = ""
    gpus: str = ""
    takes_broadcasts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IPCOffer:
    """Payload of an offer.

    address  Unix socket that the worker holds open while its engine reads; empty: the engine only joins
    gpu      name in CUDA_VISIBLE_DEVICES of the GPU that has the buckets; empty on a CPU
    others   the offers of the learner's other ranks that have a part of the model
    """

    address: str
    buckets: tuple[SharedBucket, ...]
    gpu: str = ""
    others: tuple[IPCOffer, ...] = ()

    @property
    def parts(self) -> tuple[IPCOffer, ...]:
        return (self, *self.others)

    @property
    def all_buckets(self) -> Iterator[SharedBucket]:
        return (bucket for part in self.parts for bucket in part.buckets)


def begin(
    request: TransferRequest, run: Callable[[str, int], Sequence[bytes]], *, incarnation: int, policy_version: int
) -> Transfer:
    """Accept the request of an engine that can map our memory. Raises WeightsError for any other (Sender.begin).

    run: executes an action of Handovers for this one transfer in each rank that has a part of the model, and returns
    the answers. Its second argument is the number of bytes of all parts
    """
    try:
        own, *others = (decode(answer, IPCOffer) for answer in run("begin", 0))
        offer = replace(own, others=tuple(others))
        _require_nearest(request, offer)
    except AsyncRLError:
        with contextlib.suppress(AsyncRLError):
            run("drop", 0)  # what other ranks have shared
        raise

    def send() -> None:
        if request.has_joined:
            entries = (entry for bucket in offer.all_buckets for entry in entries_of(bucket.layout))
            run("send", sum(entry.num_bytes for entry in entries))

    answer = TransferOffer(incarnation=incarnation, policy_version=policy_version, payload=encode(offer))
    return Transfer(offer=answer, send=send)


class Handovers:
    """What one rank hands over to engines, in that rank's process. Thread-safe."""

    def __init__(self, ring: Ring) -> None:
        """ring: gives the stream beside steps"""
        self._ring = ring
        self._lock = threading.Lock()
        self._begun: dict[str, _Handover] = {}  # by transfer

    def begin(self, transfer: str, snapshot: Snapshot, request: TransferRequest) -> IPCOffer:
        """Share the snapshot with an engine, if it has joined. Raises WeightsError if the engine cannot map it.

        transfer: a new name. An engine that got no answer in time asks again, while the learner still works at the
        first transfer
        """
        gpu = _check_reach(request, snapshot)
        if not request.has_joined:
            return IPCOffer(address="", buckets=(), gpu=gpu)
        handover = _Handover(snapshot, self._ring, num_ranks=request.num_ranks)
        with self._lock:
            self._begun[transfer] = handover
        return replace(handover.offer, gpu=gpu)

    def send(self, transfer: str, *, num_bytes: int) -> None:
        """Wait until the engine has taken all parts, of ``num_bytes`` together. See _Handover.run."""
        with self._lock:
            handover = self._begun.pop(transfer)
        handover.run(num_bytes=num_bytes)

    def drop(self, transfer: str) -> None:
        """Let go of what was shared and not sent: the request failed elsewhere."""
        with self._lock:
            handover = self._begun.pop(transfer, None)
        if handover is not None:
            handover.close()


class _Handover:
    """One part of a transfer: owns the memory, files and socket until the worker has disconnected.

    The engine maps all buckets at once, so on a GPU kept buckets take memory while they are handed over.
    """

    def __init__(self, snapshot: Snapshot, ring: Ring, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._on_gpu: list[Bucket] = []
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
            self.close()
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

    def close(self) -> None:
        """Take back what no worker will take."""
        self._ends.close()
        self._let_go()
        self._on_gpu.clear()

    def run(self, *, num_bytes: int) -> None:
        """Block until the worker has disconnected. Raises WeightsError if it never connects or stays for too long.

        num_bytes: of all parts, which the engine takes before it disconnects
        """
        is_reading = has_taken = False
        try:
            with self._ends:
                self._listener.settimeout(_CONNECT_SECONDS)
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_PATIENCE_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND)
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
        """Count down what an engine that never came, failed or died has not; one that took all has counted down."""
        storage_type: Any = torch.UntypedStorage
        for handle in self._handles:
            if not _is_let_go(handle):
                storage_type._release_ipc_counter_cuda(handle.counter, handle.counter_offset)


def _check_reach(request: TransferRequest, snapshot: Snapshot) -> str:
    """Return the name of the GPU that has this rank's part. Raises WeightsError if the engine cannot map it."""
    asks = _decode_request(request)
    if asks.space != process_space():
        raise WeightsError(f"{request.engine} is on another machine, or in another container, than the learner")
    device = snapshot.device
    if device.type != "cuda":
        return ""
    if any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR):
        raise WeightsError(f"expandable segments ({_ALLOCATOR[0]}) cannot be mapped by another process")
    for index in range(torch.cuda.device_count()):
        is_of_engine = index != device.index and _name_of_gpu(index) in asks.gpus.split(",")
        if is_of_engine and not torch.cuda.can_device_access_peer(index, device.index):
            raise WeightsError(f"GPU {_name_of_gpu(index)} cannot reach the memory of GPU {_name_of_gpu(device.index)}")
    return _name_of_gpu(device.index)


def _require_nearest(request: TransferRequest, offer: IPCOffer) -> None:
    """Raise WeightsError if the engine has a faster way: no part of the model is on its GPUs, and it can join a
    process group."""
    asks = _decode_request(request)
    ours = [part.gpu for part in offer.parts if part.gpu]
    if asks.takes_broadcasts and ours and asks.gpus and not set(ours) & set(asks.gpus.split(",")):
        raise WeightsError(f"{request.engine} sees GPU {asks.gpus} alone, and the weights are on GPU {','.join(ours)}")


def _decode_request(request: TransferRequest) -> IPCRequest:
    try:
        return decode(request.payload, IPCRequest)
    except MessageError as error:
        raise WeightsError(f"the request of engine {request.engine} cannot be read: {error}") from error


def _name_of_gpu(index: int) -> str:
    """Return the name of our GPU ``index`` in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def _is_let_go(handle: GpuHandle) -> bool:
    """Return whether the engine has counted down to 0. False too where the counter cannot be read.

    Torch can count down but not read. Its counters (RefcountedMapAllocator) are int64 in a shared file, after a header.
    """
    try:
        with open(f"/dev/shm/{handle.counter.decode().lstrip('/')}", "rb") as counters:
            counters.seek(_COUNTERS_HEADER + 8 * handle.counter_offset)
            return counters.read(8) == bytes(8)
    except (OSError, UnicodeDecodeError):
        return False


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
        self._takes_broadcasts = isinstance(updater, BroadcastUpdater)

    async def join(self, ask: Ask) -> None:
        """Ask whether the learner's memory is in reach."""
        await ask(self._request(has_joined=False))

    async def receive(self, ask: Ask) -> LoadReport:
        offer = await ask(self._request(has_joined=True))
        with contextlib.ExitStack() as connected:
            try:
                shared = decode(offer.payload, IPCOffer)
                connections = []
                for part in shared.parts:
                    learner, connection = await asyncio.open_unix_connection(part.address)
                    connections.append((learner, connected.enter_context(contextlib.closing(connection))))
            except (MessageError, OSError) as error:
                raise WeightsError(f"cannot take the learner's weights: {error}") from error
            try:
                for learner, _ in connections:
                    await learner.readexactly(len(_COME_IN))
            except (OSError, EOFError):
                raise WeightsError("cannot take the learner's weights: it has given this transfer up") from None
            # A server that cannot open one dies. /proc may be closed to us, by capabilities of the learner's Python.
            files = (bucket.file for bucket in shared.all_buckets if bucket.file)
            if closed := next((file for file in files if not os.access(file, os.R_OK)), ""):
                raise WeightsError(f"cannot take the learner's weights: {closed} cannot be opened")
            report = await self._updater.update(offer.version, take_shared, offer.payload)
            for _, connection in connections:
                with contextlib.suppress(OSError):  # the learner is gone
                    connection.write(_TAKEN)
                    await connection.drain()
            return report

    def _request(self, *, has_joined: bool) -> TransferRequest:
        asks = IPCRequest(
            space=process_space(),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", ""),
            takes_broadcasts=self._takes_broadcasts,
        )
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
    for shared in decode(payload, IPCOffer).all_buckets:
        data = _map_gpu(shared, shared.gpu[_rank()], device) if shared.gpu else _map_file(shared.file)
        for piece in Bucket(entries=entries_of(shared.layout), data=data).cut(_PIECE_BYTES):
            yield from replace(piece, data=piece.data.to(device, copy=True)).tensors()
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


def _map_gpu(shared: SharedBucket, memory: GpuHandle, device: torch.device) -> torch.Tensor:
    """Map the bucket into the address space of ``device``, wherever it lies."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    is_here = _uuid(index) == memory.gpu
    storage_type: Any = torch.UntypedStorage
    storage = storage_type._new_shared_cuda(
        index,
        memory.handle,
        memory.num_bytes,
        memory.offset,
        memory.counter,
        memory.counter_offset,
        memory.event,
        memory.waits_for_event and is_here,  # events are of one device; the learner has waited for the data
    )
    mapped = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
    num_bytes = sum(entry.num_bytes for entry in entries_of(shared.layout))
    return mapped.set_(storage, shared.start, (num_bytes,))  # type: ignore[call-overload, no-any-return]


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
