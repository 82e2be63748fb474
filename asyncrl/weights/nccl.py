"""Weights from the learner's memory into each engine's, and into folders for whoever cannot take them so.

One collective of two parties an engine: the learner is rank 0, the engine's processes are the others. No engine waits
for another, and one that dies takes with it what was on the way to it and nothing else. NCCL between GPUs (two
processes on one GPU cannot meet: they use the folder), gloo on a CPU.
NCCL_CUMEM_ENABLE must be 0 in the learner's environment, as SGLang sets it in its own: cli.py sees to it.
Tests: tests/test_nccl.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.snapshot import BUCKET_BYTES, Bucket, Snapshot
from asyncrl.transfer_messages import BucketLayout, TransferOffer, TransferRequest
from asyncrl.weights.files import FilesChannel

_SLOWEST_BYTES_PER_SECOND: Final = 2e8
"""An engine that takes weights slower than this, and then some, is given up."""
_OLD_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 5e-4
_HANDOVER_SECONDS: Final = 1.0
"""An engine may ask again a moment before our thread knows that it has everything."""
_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT: Final = threading.Lock()
"""The environment is the process's: engines that join at the same time take turns in it."""


class NCCLChannel:
    """See WeightChannel: folders as FilesChannel makes them, and a sender."""

    def __init__(self, directory: Path, *, keep: int, model_path: Path, host: str, bucket_bytes: int) -> None:
        """See Sender."""
        self._files = FilesChannel(directory, keep=keep, model_path=model_path)
        self._sender = Sender(host, bucket_bytes=bucket_bytes)

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        return self._files.publish(snapshot, run_epoch=run_epoch, policy_version=policy_version)

    def verify(self, weights: WeightVersion) -> Path:
        return self._files.verify(weights)

    @property
    def progress(self) -> int:
        return self._files.progress

    @property
    def published_bytes(self) -> int:
        return self._files.published_bytes

    @property
    def sender(self) -> Sender:
        return self._sender


class Sender:
    """See Sender in protocols/weights.py. Thread-safe; one transfer at a time to one engine, any number to others."""

    def __init__(self, host: str, *, bucket_bytes: int = BUCKET_BYTES, patience_seconds: float = 60.0) -> None:
        """
        host              the learner's address as engines see it
        bucket_bytes      of one collective: an engine needs so much memory beside its weights, and pauses 2 to 9 ms
                          longer for each on a GPU (docs/performance.md)
        patience_seconds  for an engine to meet us, and beside the time its weights may take
        """
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._newest: tuple[tuple[int, int], Snapshot] | None = None

    def hold(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> None:
        with self._lock:
            self._newest = ((run_epoch, policy_version), snapshot.cut(self._bucket_bytes))

    def begin(self, request: TransferRequest) -> Transfer:
        with self._lock:
            if self._newest is None:
                raise WeightsError("the learner has no weights to send yet")
            (run_epoch, policy_version), snapshot = self._newest
            kind = "nccl" if snapshot.buckets[0].data.is_cuda else "gloo"
            group = before = self._groups.get(request.engine)
            if group is None or group.name != request.group:
                if request.has_joined:
                    raise WeightsError(f"the learner has no group {request.group}: it was started anew; join again")
                group = self._groups[request.engine] = self._opened(request, kind)
        if before is not None and before is not group:  # of a life of this engine that is over
            before.give_up()
        if not group.is_free.acquire(timeout=_HANDOVER_SECONDS):
            raise WeightsError(f"group {request.group} is broken or still busy; join under another name")
        offer = TransferOffer(
            host=self._host,
            port=group.port,
            collective=kind,
            run_epoch=run_epoch,
            policy_version=policy_version,
            buckets=tuple(map(_layout, snapshot.buckets)),
        )
        return Transfer(offer, group, snapshot if request.has_joined else None)

    def forget(self, *, engines: Collection[str]) -> None:
        """Give up the groups of engines that are none of ``engines`` and have taken nothing for a while."""
        with self._lock:
            gone = [name for name, group in self._groups.items() if name not in engines and group.is_old]
            groups = [self._groups.pop(name) for name in gone]
        for group in groups:
            group.give_up()

    def _opened(self, request: TransferRequest, kind: str) -> _Group:
        try:
            return _Group(request.group, kind, 1 + request.num_ranks, seconds=self._patience)
        except RuntimeError as error:  # torch's for a port or a descriptor that cannot be had
            raise WeightsError(f"cannot open a rendezvous for {request.engine}: {error}") from error


class Transfer:
    """See Transfer in protocols/weights.py."""

    def __init__(self, offer: TransferOffer, group: _Group, snapshot: Snapshot | None) -> None:
        """``snapshot`` None: only meet."""
        self.offer = offer
        self._group = group
        self._snapshot = snapshot

    def send(self) -> None:
        try:
            if self._snapshot is None:
                self._group.join()
            else:
                self._group.broadcast(self._snapshot)
        except (RuntimeError, WeightsError) as error:
            self._group.give_up()
            raise WeightsError(f"group {self._group.name}: {error}") from error
        self._group.used = time.monotonic()
        self._group.is_free.release()


class _Group:
    """The collective with one engine."""

    def __init__(self, name: str, kind: str, size: int, *, seconds: float) -> None:
        self.name = name
        self.is_free = threading.Lock()  # never again once a transfer failed
        self._kind, self._size, self._seconds = kind, size, seconds
        # It listens everywhere; "localhost" is for its own client: torch asks DNS for the name of any other address.
        wait = timedelta(seconds=seconds)
        self._store = dist.TCPStore("localhost", 0, size, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        self._collective: Any = None
        self.used = time.monotonic()

    @property
    def is_old(self) -> bool:
        """Longer without use than an engine may take from joining to its first heartbeat."""
        return time.monotonic() - self.used > _OLD_SECONDS

    @property
    def port(self) -> int:
        return int(self._store.port)

    def join(self) -> None:
        """Gloo meets here; NCCL says here how to, and meets at the first broadcast.

        The names of keys in the store are those that torch.distributed gives the engine's side of the group.
        """
        keys: Any = self._store
        for prefix in (self.name, f"{self.name}/", "cuda/" if self._kind == "nccl" else "cpu/"):
            keys = PrefixStore(prefix, keys)
        if self._kind == "gloo":
            self._collective = dist.ProcessGroupGloo(keys, 0, self._size, timedelta(seconds=self._seconds))
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # we give up ourselves, earlier
        with _left_alone():
            self._collective = dist.ProcessGroupNCCL(keys, 0, self._size, options)

    def broadcast(self, snapshot: Snapshot) -> None:
        """Blocks until the engine has it all. Raises WeightsError, RuntimeError."""
        deadline = time.monotonic() + self._seconds + snapshot.num_bytes / _SLOWEST_BYTES_PER_SECOND
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _own_stream(snapshot.buckets[0].data):
            for bucket in snapshot.buckets:
                collective = self._collective
                if collective is None:
                    raise WeightsError("it was given up: another life of the engine has come")
                work = collective.broadcast([bucket.data], options)
                del collective  # nothing but the group keeps its connections
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise WeightsError("the engine did not take its weights in time")
                    time.sleep(_POLL_SECONDS)
                if self._kind == "gloo":
                    work.wait()  # says what went wrong; on CUDA it would only order streams

    def give_up(self) -> None:
        """So that nobody waits on: not the kernel on the learner's GPU, nor the engine."""
        if self._kind == "nccl" and self._collective is not None:
            self._collective.abort()
        if self._kind == "gloo":
            self._collective = None  # its connections close


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    """Around the making of a group: torch reads there what it does on errors, and by default it ends the process."""
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
    """The learner's would let the transfer wait for the step that is running."""
    if not data.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(data.device))  # type: ignore[no-untyped-call]


def _layout(bucket: Bucket) -> BucketLayout:
    return BucketLayout(
        names=tuple(entry.name for entry in bucket.entries),
        dtypes=tuple(str(entry.dtype).removeprefix("torch.") for entry in bucket.entries),
        shapes=tuple(entry.shape for entry in bucket.entries),
    )


def own_address(peer: str) -> str:
    """This machine's address as ``peer`` sees it: of the interface that leads there; loopback when none does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
