"""Sends weights from the learner's memory to engines' memory. Engines that cannot receive load folders.

Each engine has its own process group with every rank of the learner that has a part of the model. The learner's rank is
rank 0, and the engine's processes are the others. No engine waits for another, and a dying engine loses only its own
transfer. GPUs use NCCL, CPUs use gloo. An engine that can map the learner's memory copies it instead (ipc.py).
NCCL_CUMEM_ENABLE must be 0 in the learner's environment, as in SGLang's own; adapters/registry.py sets it in every
process of the learner.
Tests: tests/unit/weights/test_nccl.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncrl.errors import MessageError, WeightsError
from asyncrl.messages.codec import decode, encode, is_encoded
from asyncrl.messages.validation import require
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import BUCKET_BYTES, AnyBucket, PartWorker, Snapshot
from asyncrl.weights import ipc
from asyncrl.weights.bucket_layout import layout_of
from asyncrl.weights.ipc import SLOWEST_BYTES_PER_SECOND, IPCRequest
from asyncrl.weights.port import Transfer
from asyncrl.weights.ring import Ring

_OLD_SECONDS: Final = 300.0
_MAX_RANKS: Final = 1024
_MAX_GROUPS: Final = 1024
_FILES_PER_GROUP: Final = 16
"""A rendezvous has nine open files, and a connection for each rank. The rest is left for other files."""
_MOST_BUCKETS: Final = 64
_POLL_SECONDS: Final = 5e-4
_QUEUED: Final = 4
"""NCCL broadcasts to one engine that are queued at a time, so that one begins as soon as another ends. They share a
stream: only the first takes part of the GPU while it waits for the engine."""
_QUEUED_KEPT: Final = 2
"""The same for kept buckets: one is filled while another is sent. Engines share the memory for them (ring.py)."""
_EXPORT_SECONDS: Final = 8.0
"""An engine's request waits for an export that is being made, a little less long than the engine for an answer."""
_HANDOVER_SECONDS: Final = 1.0
"""An engine may ask again just before our thread notices that the last transfer is complete."""
_GIVEN_UP: Final = "it was given up: the engine was restarted"
CUMEM: Final = "NCCL_CUMEM_ENABLE"
"""Both ends must agree on it: NCCL exchanges memory handles of one kind or the other, and does not compare."""
_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT: Final = threading.Lock()
"""The process has one environment, so concurrent joins must take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """Payload of a request.  buckets_at_once: see BroadcastUpdater in weights/port.py"""

    buckets_at_once: int = 1

    def __post_init__(self) -> None:
        require(
            1 <= self.buckets_at_once <= _MOST_BUCKETS,
            f"buckets_at_once must be in 1..{_MOST_BUCKETS}, got {self.buckets_at_once}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOffer:
    """Payload of an offer: the rendezvous, and the buckets that are sent now, in order, one per broadcast.

    host, port, collective  rendezvous of the group, and its kind: nccl or gloo
    others                  the offers of the learner's other ranks that have a part of the model
    """

    host: str
    port: int
    collective: str
    buckets: tuple[BucketLayout, ...]
    others: tuple[CollectiveOffer, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must be in 0..65535, got {self.port}")


def group_of_part(group: str, number: int) -> str:
    """Name of an engine's group with the ``number``-th rank that has a part of the model, from 0."""
    return f"{group}.{number}" if number else group


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommand:
    """What a rank that has a part of the model should do.

    action            begin: prepare a transfer to an engine; send: do it; drop: do not, after all (IPC alone); forget:
                      drop engines that are gone
    request           the engine's request
    transfer          names one transfer (IPC alone)
    number            number of the part, from 0
    host              the learner's address as seen by engines; a rank on another machine uses its own address
    bucket_bytes      see Sender
    patience_seconds  see Sender
    beside_bytes      bytes of all parts, which the engine may receive first
    engines           engines not to forget
    """

    action: str
    request: TransferRequest | None = None
    transfer: str = ""
    number: int = 0
    host: str = ""
    bucket_bytes: int = 0
    patience_seconds: float = 0.0
    beside_bytes: int = 0
    engines: tuple[str, ...] = ()


class Sender:
    """See Sender in weights/port.py. Each rank of the learner sends its part of the model from its own memory."""

    def __init__(self, host: str, *, bucket_bytes: int = BUCKET_BYTES, patience_seconds: float = 60.0) -> None:
        """
        host              the learner's address as seen by engines
        bucket_bytes      memory that an engine needs besides its weights: the size of one collective. Over NCCL, it is
                          the size of all buckets that the engine has in memory at a time (CollectiveRequest)
        patience_seconds  timeout for an engine to join; also added to the time allowed for the transfer
        """
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._patience = patience_seconds
        self._own = PartSender()
        self._changed = threading.Condition()
        self._newest: tuple[tuple[int, int], Snapshot] | None = None
        self._is_withdrawn = False

    def set_weights(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        with self._changed:
            self._newest, self._is_withdrawn = ((incarnation, policy_version), snapshot), False
            self._changed.notify_all()

    def withdraw(self) -> None:
        with self._changed:
            self._is_withdrawn = self._is_withdrawn or self._newest is not None
            self._newest = None

    def begin(self, request: TransferRequest) -> Transfer:
        if request.num_ranks > _MAX_RANKS:
            raise WeightsError(
                f"engine {request.engine} says it has {request.num_ranks:,} ranks, at most {_MAX_RANKS:,}"
            )
        (incarnation, policy_version), snapshot = self._held()
        if is_encoded(request.payload, IPCRequest):
            run_ipc = functools.partial(self._run_ipc, snapshot, request, uuid.uuid4().hex)
            return ipc.begin(request, run_ipc, incarnation=incarnation, policy_version=policy_version)
        begin = PartCommand(
            action="begin",
            request=request,
            host=self._host,
            bucket_bytes=self._bucket_bytes,
            patience_seconds=self._patience,
        )
        answers = self._run(snapshot, [replace(begin, number=number) for number in range(1 + len(snapshot.others))])
        own, *others = parts = [decode(answer, CollectiveOffer) for answer in answers]
        offer = TransferOffer(
            incarnation=incarnation, policy_version=policy_version, payload=encode(replace(own, others=tuple(others)))
        )
        num_bytes = 8 * sum(bucket.num_elements for part in parts for bucket in part.buckets)  # upper bound
        send = PartCommand(action="send", request=request, beside_bytes=num_bytes)

        def run() -> None:
            self._run(snapshot, [replace(send, number=number) for number in range(len(parts))])

        return Transfer(offer=offer, send=run)

    def forget(self, *, engines: Collection[str]) -> None:
        with self._changed:
            newest = self._newest
        if newest is None:  # nothing was sent yet; or while a version is exported, and the next engine to join asks
            return
        _, snapshot = newest
        with contextlib.suppress(WeightsError):  # a rank is gone
            self._run(snapshot, [PartCommand(action="forget", engines=tuple(engines))] * (1 + len(snapshot.others)))

    def _held(self) -> tuple[tuple[int, int], Snapshot]:
        """Return the newest weights. Waits for an export. Raises WeightsError if there are none."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_withdrawn, _EXPORT_SECONDS):
                raise WeightsError(f"the learner still exports a version, after {_EXPORT_SECONDS:g} s")
            if self._newest is None:
                raise WeightsError("the learner has no weights to send yet")
            return self._newest

    def _run_ipc(
        self, snapshot: Snapshot, request: TransferRequest, transfer: str, action: str, num_bytes: int
    ) -> list[bytes]:
        command = PartCommand(action=action, request=request, transfer=transfer, beside_bytes=num_bytes)
        return self._run(snapshot, [command] * (1 + len(snapshot.others)))

    def _run(self, snapshot: Snapshot, commands: Sequence[PartCommand]) -> list[bytes]:
        return snapshot.run_on_parts(self._own, list(map(encode, commands)))


class PartSender(PartWorker):
    """Sends the part of one rank, in that rank's process. Thread-safe; one transfer at a time per engine.

    The ranks send concurrently and during training, so different engines may receive different parts at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self.ring = Ring()
        self._handovers = ipc.Handovers(self.ring)

    def __call__(self, snapshot: Snapshot, command: bytes) -> bytes:
        asked = decode(command, PartCommand)
        if asked.action == "forget":
            self._forget(asked.engines)
            return b""
        assert asked.request is not None, "only forget has none"
        if is_encoded(asked.request.payload, IPCRequest):
            return self._hand_over(snapshot, asked, asked.request)
        if asked.action == "begin":
            return encode(self._begin(snapshot, asked, asked.request))
        self._send(asked, asked.request)
        return b""

    def _hand_over(self, snapshot: Snapshot, command: PartCommand, request: TransferRequest) -> bytes:
        match command.action:
            case "begin":
                return encode(self._handovers.begin(command.transfer, snapshot, request))
            case "send":
                self._handovers.send(command.transfer, num_bytes=command.beside_bytes)
            case "drop":
                self._handovers.drop(command.transfer)
        return b""

    def _begin(self, snapshot: Snapshot, command: PartCommand, request: TransferRequest) -> CollectiveOffer:
        """Prepare a transfer: of our part, or only of the name and address of the group to join."""
        name = group_of_part(request.group, command.number)
        kind = _kind_of(snapshot)
        at_once = _buckets_at_once(request) if kind == "nccl" else 1
        snapshot = snapshot.cut(max(1, command.bucket_bytes // at_once))
        with self._lock:
            group = before = self._groups.get(request.engine)
            if group is None or group.name != name:
                if request.has_joined:
                    raise WeightsError(f"the learner has no group {name}: it was restarted; join again")
                if group is None:
                    self._make_room(request.engine)
                group = self._groups[request.engine] = _open_group(
                    name, kind, request, seconds=command.patience_seconds
                )
        if before is not None and before is not group:  # left over from an earlier process of this engine
            before.give_up()
        if not group.is_free.acquire(timeout=_HANDOVER_SECONDS):
            raise WeightsError(f"group {name} is broken or still busy; join under another name")
        group.prepared = snapshot if request.has_joined else None
        host = command.host if _is_ours(command.host) else _own_address(towards=command.host)
        return CollectiveOffer(
            host=host, port=group.port, collective=kind, buckets=tuple(map(layout_of, snapshot.buckets))
        )

    def _send(self, command: PartCommand, request: TransferRequest) -> None:
        """Join the engine, or send it what was prepared. Raises WeightsError, and gives the group up, if that fails."""
        name = group_of_part(request.group, command.number)
        with self._lock:
            group = self._groups.get(request.engine)
        if group is None or group.name != name:
            raise WeightsError(f"{request.engine} asked again, in another group than {name}: it was restarted")
        try:
            if group.prepared is None:
                group.join()
            else:
                group.broadcast(group.prepared, ring=self.ring, beside_bytes=command.beside_bytes)
        except (RuntimeError, WeightsError) as error:
            group.give_up()
            raise WeightsError(f"group {name}: {error}") from error
        finally:
            group.prepared = None
        group.used = time.monotonic()
        group.is_free.release()

    def _forget(self, engines: Collection[str]) -> None:
        """Give up groups of engines not in ``engines`` that have received nothing for a while."""
        with self._lock:
            gone = [name for name, group in self._groups.items() if name not in engines and group.is_old]
            groups = [self._groups.pop(name) for name in gone]
        for group in groups:
            group.give_up()

    def _make_room(self, engine: str) -> None:
        """Drop given-up groups if there are too many groups. Raises WeightsError if that is not enough. A client may
        invent engines, and each takes a port, files and a thread until its time to join is over."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = _MAX_GROUPS if files == resource.RLIM_INFINITY else min(_MAX_GROUPS, max(files // _FILES_PER_GROUP, 1))
        if len(self._groups) < room:
            return
        for name in [name for name, group in self._groups.items() if group.is_given_up]:
            del self._groups[name]
        if len(self._groups) >= room:
            raise WeightsError(f"no room for {engine}: the learner has groups with {room:,} engines already")


def _open_group(name: str, kind: str, request: TransferRequest, *, seconds: float) -> _Group:
    if kind == "nccl" and CUMEM not in os.environ:
        raise WeightsError(f"{CUMEM} is not set in this process; before it uses a GPU, set what engines have: 0")
    try:
        return _Group(name, kind, 1 + request.num_ranks, seconds=seconds)
    except RuntimeError as error:  # torch found no free port or file descriptor
        raise WeightsError(f"cannot open a rendezvous for {request.engine}: {error}") from error


class _Group:
    """The process group with one engine."""

    def __init__(self, name: str, kind: str, size: int, *, seconds: float) -> None:
        self.name = name
        self.is_free = threading.Lock()  # stays locked once a transfer has failed
        self._kind = kind
        self._size = size
        self._seconds = seconds
        # The store listens on all interfaces. Its own client uses "localhost", as torch resolves other names by DNS.
        wait = timedelta(seconds=seconds)
        self._store = dist.TCPStore("localhost", 0, size, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        self._collective: Any = None
        self.prepared: Snapshot | None = None
        """What to send next; None: only join."""
        self.is_given_up = False
        self.used = time.monotonic()

    @property
    def is_old(self) -> bool:
        """Whether the group is unused for longer than an engine may take from joining to its first heartbeat."""
        return time.monotonic() - self.used > _OLD_SECONDS

    @property
    def port(self) -> int:
        return int(self._store.port)

    def join(self) -> None:
        """Join the group. Gloo connects here. NCCL exchanges its id here and connects at the first broadcast.

        The store's keys must match those that torch.distributed uses on the engine's side.
        """
        keys: Any = self._store
        for prefix in (self.name, f"{self.name}/", "cuda/" if self._kind == "nccl" else "cpu/"):
            keys = PrefixStore(prefix, keys)
        if self._kind == "gloo":
            self._collective = dist.ProcessGroupGloo(keys, 0, self._size, timedelta(seconds=self._seconds))
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # our own timeout is shorter
        with _left_alone():
            self._collective = dist.ProcessGroupNCCL(keys, 0, self._size, options)

    def broadcast(self, snapshot: Snapshot, *, ring: Ring, beside_bytes: int) -> None:
        """Send all buckets. Blocks until the engine has received them. Raises WeightsError, RuntimeError.

        ring: memory for kept buckets
        """
        num_bytes = snapshot.num_bytes + beside_bytes
        deadline = time.monotonic() + self._seconds + num_bytes / SLOWEST_BYTES_PER_SECOND
        options = dist.BroadcastOptions()
        options.rootRank = 0
        queued: deque[Any] = deque()
        blocks: deque[torch.Tensor | None] = deque()  # of what is queued; None: a copy needs none

        def finish_first() -> None:
            self._finish(queued.popleft(), deadline=deadline)
            if (block := blocks.popleft()) is not None:
                ring.give(block)

        try:
            with ring.beside_steps(snapshot.device):
                for bucket in snapshot.buckets:
                    while len(queued) >= self._most_queued(bucket):
                        finish_first()
                    block = None
                    if bucket.is_kept:
                        take = functools.partial(ring.take, bucket.num_bytes, bucket.device)
                        while (block := take(seconds=0)) is None and queued:
                            finish_first()
                        if block is None and (block := take(seconds=max(0, deadline - time.monotonic()))) is None:
                            raise WeightsError("other engines did not take their weights in time")
                    blocks.append(block)
                    collective = self._collective
                    if collective is None:
                        raise WeightsError(_GIVEN_UP)
                    queued.append(collective.broadcast([bucket.filled(block).data], options))
                    del collective  # so that only the group keeps its connections open
                while queued:
                    finish_first()
        finally:
            for block in blocks:
                if block is not None:
                    ring.forget(block)

    def _most_queued(self, bucket: AnyBucket) -> int:
        """How many broadcasts may be queued before one of ``bucket``: so that one can begin as soon as another ends."""
        if self._kind == "gloo":
            return 1
        return _QUEUED_KEPT if bucket.is_kept else _QUEUED

    def _finish(self, work: Any, *, deadline: float) -> None:
        """Wait for a broadcast. Raises WeightsError, RuntimeError."""
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WeightsError("the engine did not take its weights in time")
            time.sleep(_POLL_SECONDS)
        if self._kind == "gloo":
            work.wait()  # raises the error; on CUDA it would only order streams
        elif self.is_given_up:  # which ends queued broadcasts as well
            raise WeightsError(_GIVEN_UP)

    def give_up(self) -> None:
        """Abort, so that neither the kernel on the learner's GPU nor the engine keeps waiting."""
        self.is_given_up = True
        if self._kind == "nccl" and self._collective is not None:
            self._collective.abort()
        if self._kind == "gloo":
            self._collective = None  # closes its connections


def _kind_of(snapshot: Snapshot) -> str:
    return "nccl" if snapshot.device.type == "cuda" else "gloo"


def _buckets_at_once(request: TransferRequest) -> int:
    """How many buckets the engine has in memory at a time; one if it does not say. Raises WeightsError."""
    if not request.payload:
        return 1
    try:
        return decode(request.payload, CollectiveRequest).buckets_at_once
    except MessageError as error:
        raise WeightsError(f"the request of engine {request.engine} is none of this channel: {error}") from error


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    """Use around creating a group. Torch reads its error handling from the environment; by default it aborts."""
    with _ENVIRONMENT:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def _is_ours(host: str) -> bool:
    """Whether the host is an address of this machine."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False


def _own_address(*, towards: str) -> str:
    """Address of this machine as seen from ``towards``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
