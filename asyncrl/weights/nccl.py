"""Sends weights from the learner's memory to engines' memory. Engines that cannot receive load folders.

Each engine has its own process group with every rank of the learner that has a part of the model. The learner's rank is
rank 0, and the engine's processes are the others. No engine waits for another, and a dying engine loses only its own
transfer. GPUs use NCCL, CPUs use gloo. Two processes on one GPU cannot use NCCL and load the folder instead.
NCCL_CUMEM_ENABLE must be 0 in the learner's environment, as in SGLang's own; adapters/registry.py sets it in every
process of the learner.
Tests: tests/unit/weights/test_nccl.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncrl.errors import MessageError, WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import BUCKET_BYTES, Bucket, Snapshot
from asyncrl.weights.collective import CollectiveOffer, CollectiveRequest

_SLOWEST_BYTES_PER_SECOND: Final = 2e8
"""Slowest transfer rate that is tolerated. A fixed time is allowed on top."""
_OLD_SECONDS: Final = 300.0
_MAX_RANKS: Final = 1024
_MAX_GROUPS: Final = 1024
_FILES_PER_GROUP: Final = 16
"""A rendezvous has nine open files, and a connection for each rank. The rest is left for other files."""
_POLL_SECONDS: Final = 5e-4
_QUEUED: Final = 4
"""NCCL broadcasts to one engine that are queued at a time, so that one begins as soon as another ends. They share a
stream: only the first takes part of the GPU while it waits for the engine."""
_HANDOVER_SECONDS: Final = 1.0
"""An engine may ask again just before our thread notices that the last transfer is complete."""
_GIVEN_UP: Final = "it was given up: the engine was restarted"
CUMEM: Final = "NCCL_CUMEM_ENABLE"
"""Both ends must agree on it: NCCL exchanges memory handles of one kind or the other, and does not compare."""
_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT: Final = threading.Lock()
"""The process has one environment, so concurrent joins must take turns."""


class Sender:
    """See Sender in weights/port.py. Thread-safe; one transfer at a time per engine, any number of engines."""

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
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._newest: tuple[tuple[int, int], Snapshot] | None = None

    def hold(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        with self._lock:
            self._newest = ((incarnation, policy_version), snapshot.cut(self._bucket_bytes))

    def begin(self, request: TransferRequest) -> Transfer:
        with self._lock:
            newest = self._newest
        if newest is None:
            raise WeightsError("the learner has no weights to send yet")
        return self.begin_with(request, newest[1], order=newest[0])

    def begin_with(self, request: TransferRequest, snapshot: Snapshot, *, order: tuple[int, int]) -> Transfer:
        """Begin a transfer of the given buckets, whatever is the newest version."""
        if request.num_ranks > _MAX_RANKS:
            raise WeightsError(
                f"engine {request.engine} says it has {request.num_ranks:,} ranks, at most {_MAX_RANKS:,}"
            )
        kind = _kind_of(snapshot)
        if kind == "nccl":
            snapshot = snapshot.cut(max(1, self._bucket_bytes // _buckets_at_once(request)))
        with self._lock:
            group = before = self._groups.get(request.engine)
            if group is None or group.name != request.group:
                if request.has_joined:
                    raise WeightsError(f"the learner has no group {request.group}: it was restarted; join again")
                if group is None:
                    self._make_room(request.engine)
                group = self._groups[request.engine] = self._opened(request, kind)
        if before is not None and before is not group:  # left over from an earlier process of this engine
            before.give_up()
        if not group.is_free.acquire(timeout=_HANDOVER_SECONDS):
            raise WeightsError(f"group {request.group} is broken or still busy; join under another name")
        meeting = CollectiveOffer(
            host=self._host, port=group.port, collective=kind, buckets=tuple(map(_layout, snapshot.buckets))
        )
        offer = TransferOffer(incarnation=order[0], policy_version=order[1], payload=encode(meeting))
        return Transfer(offer, group, snapshot if request.has_joined else None)

    def forget(self, *, engines: Collection[str]) -> None:
        """Give up groups of engines not in ``engines`` that have received nothing for a while."""
        with self._lock:
            gone = [name for name, group in self._groups.items() if name not in engines and group.is_old]
            groups = [self._groups.pop(name) for name in gone]
        for group in groups:
            group.give_up()

    def _make_room(self, engine: str) -> None:
        """Drop given-up groups if there are too many groups. Raises WeightsError if that is not enough. A client may
        invent engines, and each takes a port, files and a thread until its time to join is over."""
        room = _room()
        if len(self._groups) < room:
            return
        for name in [name for name, group in self._groups.items() if group.is_given_up]:
            del self._groups[name]
        if len(self._groups) >= room:
            raise WeightsError(f"no room for {engine}: the learner has groups with {room:,} engines already")

    def _opened(self, request: TransferRequest, kind: str) -> _Group:
        if kind == "nccl" and CUMEM not in os.environ:
            raise WeightsError(f"{CUMEM} is not set in this process; before it uses a GPU, set what engines have: 0")
        try:
            return _Group(request.group, kind, 1 + request.num_ranks, seconds=self._patience)
        except RuntimeError as error:  # torch found no free port or file descriptor
            raise WeightsError(f"cannot open a rendezvous for {request.engine}: {error}") from error


class Transfer:
    """See Transfer in weights/port.py."""

    def __init__(self, offer: TransferOffer, group: _Group, snapshot: Snapshot | None) -> None:
        """``snapshot`` None: only join, send nothing."""
        self.offer = offer
        self._group = group
        self._snapshot = snapshot

    def send(self, *, beside_bytes: int = 0) -> None:
        """See Transfer. ``beside_bytes``: bytes that the engine may receive from other ranks first."""
        try:
            if self._snapshot is None:
                self._group.join()
            else:
                self._group.broadcast(self._snapshot, beside_bytes=beside_bytes)
        except (RuntimeError, WeightsError) as error:
            self._group.give_up()
            raise WeightsError(f"group {self._group.name}: {error}") from error
        self._group.used = time.monotonic()
        self._group.is_free.release()


class _Group:
    """The process group with one engine."""

    def __init__(self, name: str, kind: str, size: int, *, seconds: float) -> None:
        self.name = name
        self.is_free = threading.Lock()  # stays locked once a transfer has failed
        self._kind, self._size, self._seconds = kind, size, seconds
        # The store listens on all interfaces. Its own client uses "localhost", as torch resolves other names by DNS.
        wait = timedelta(seconds=seconds)
        self._store = dist.TCPStore("localhost", 0, size, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        self._collective: Any = None
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

    def broadcast(self, snapshot: Snapshot, *, beside_bytes: int) -> None:
        """Send all buckets. Blocks until the engine has received them. Raises WeightsError, RuntimeError."""
        num_bytes = snapshot.num_bytes + beside_bytes
        deadline = time.monotonic() + self._seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND
        options = dist.BroadcastOptions()
        options.rootRank = 0
        queued: deque[Any] = deque()
        with _own_stream(snapshot.buckets[0].data):
            for bucket in snapshot.buckets:
                if len(queued) == (_QUEUED if self._kind == "nccl" else 1):
                    self._finish(queued.popleft(), deadline=deadline)
                collective = self._collective
                if collective is None:
                    raise WeightsError(_GIVEN_UP)
                queued.append(collective.broadcast([bucket.data], options))
                del collective  # so that only the group keeps its connections open
            while queued:
                self._finish(queued.popleft(), deadline=deadline)

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
    return "nccl" if snapshot.buckets[0].data.is_cuda else "gloo"


def _buckets_at_once(request: TransferRequest) -> int:
    """How many buckets the engine has in memory at a time; one if it does not say. Raises WeightsError."""
    if not request.payload:
        return 1
    try:
        return decode(request.payload, CollectiveRequest).buckets_at_once
    except MessageError as error:
        raise WeightsError(f"the request of engine {request.engine} is none of this channel: {error}") from error


def _room() -> int:
    """Maximum number of groups; lower if the process may open few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_GROUPS if files == resource.RLIM_INFINITY else min(_MAX_GROUPS, max(files // _FILES_PER_GROUP, 1))


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


def _own_stream(data: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Use a separate stream: on the learner's stream, the transfer would wait for the running step."""
    if not data.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(data.device))  # type: ignore[no-untyped-call]


def _layout(bucket: Bucket) -> BucketLayout:
    return BucketLayout(
        names=tuple(entry.name for entry in bucket.entries),
        dtypes=tuple(str(entry.dtype).removeprefix("torch.") for entry in bucket.entries),
        shapes=tuple(entry.shape for entry in bucket.entries),
    )
