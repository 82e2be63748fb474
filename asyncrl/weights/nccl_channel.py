"""The nccl channel: model folders, and weights sent from the memory of every learner rank that has a part of the model.

An engine has a separate group with each of these ranks (nccl.py). It takes their parts one after the other, and
switches once it has all. The ranks send concurrently and during training, so different engines may receive different
parts at the same time. Tests: tests/unit/weights/test_nccl.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.bus.port import Bus
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.parts import on_every_part
from asyncrl.tensors.snapshot import BUCKET_BYTES, PartWorker, Snapshot
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.collective import CollectiveOffer, CollectiveReceiver, group_of_part
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import CUMEM, Sender, Transfer
from asyncrl.weights.port import Intake
from asyncrl.weights.port import Transfer as AnyTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[weights.options] of the nccl channel."""

    host: str = ""
    """The learner's address as seen by engines; empty: the one it uses to reach the bus."""
    bucket_megabytes: int = 2048
    """MiB that an engine needs besides its weights while it receives; more only for a tensor that is larger. SGLang
    servers with asyncrl's loader have four buckets of a quarter at a time, other servers one of this size. Smaller
    values lengthen the pause."""

    def __post_init__(self) -> None:
        if not 1 <= self.bucket_megabytes <= 2048:
            raise ConfigError(f"bucket_megabytes must be 1 to 2048, got {self.bucket_megabytes}")


class NCCLChannel(ChannelAdapter):
    """See WeightChannel. Stores folders as FilesChannel does, and has a sender."""

    options_type = Options
    takes = frozenset({"int4"})
    takes_parts = True
    sends_from_memory = True

    @classmethod
    def build(cls, run: RunConfig, *, bus: Bus) -> NCCLChannel:
        options: Options = cls.options(run)
        return cls(
            run.weights_directory,
            keep=run.weights.keep,
            model_path=Path(run.model.path),
            host=options.host or bus.own_address,
            bucket_bytes=options.bucket_megabytes * 2**20,
        )

    @classmethod
    def learner_environment(cls, run: RunConfig) -> Mapping[str, str]:
        return {CUMEM: "0"}  # as in SGLang

    def __init__(self, directory: Path, *, keep: int, model_path: Path, host: str, bucket_bytes: int) -> None:
        """See Sender."""
        self._files = FilesChannel(directory, keep=keep, model_path=model_path)
        self._sender = ModelSender(host, bucket_bytes=bucket_bytes)

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        return self._files.publish(snapshot, incarnation=incarnation, policy_version=policy_version)

    def verify(self, weights: WeightVersion) -> Path:
        return self._files.verify(weights)

    @property
    def progress(self) -> int:
        return self._files.progress

    @property
    def published_bytes(self) -> int:
        return self._files.published_bytes

    @property
    def sender(self) -> ModelSender:
        return self._sender

    def receiver(self, intake: Intake, *, engine: str) -> CollectiveReceiver | None:
        if intake.collectives is None:
            return None
        return CollectiveReceiver(intake.collectives, engine=engine, num_ranks=intake.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Tells a rank to prepare sending its part.

    number        number of the part, from 0
    host          the learner's address as seen by engines; a rank on another machine uses its own address
    """

    request: TransferRequest
    incarnation: int
    policy_version: int
    number: int
    host: str
    bucket_bytes: int
    patience_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Tells a rank to send its prepared part to this engine, or to join it.

    group         of the request that the part was prepared for
    beside_bytes  bytes of all parts
    """

    engine: str
    group: str
    beside_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Tells a rank to forget engines; see Sender.forget."""

    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder:
    """An order to a rank; exactly one field is set."""

    begin: Begin | None = None
    send: Send | None = None
    forget: Forget | None = None


class PartSender(PartWorker):
    """Sends the part of one rank, in that rank's process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        self._prepared: dict[str, tuple[str, Transfer]] = {}  # by engine: its newest group, and the part for it

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        told = decode(order, PartOrder)
        if told.begin is not None:
            return encode(self._begin(snapshot, told.begin))
        if told.send is not None:
            self._taken(told.send).send(beside_bytes=told.send.beside_bytes)
        elif told.forget is not None and self._sender is not None:
            self._sender.forget(engines=told.forget.engines)
        return b""

    def _begin(self, snapshot: Snapshot, told: Begin) -> TransferOffer:
        with self._lock:
            if self._sender is None:
                host = told.host if _is_ours(told.host) else _own_address(towards=told.host)
                self._sender = Sender(host, bucket_bytes=told.bucket_bytes, patience_seconds=told.patience_seconds)
        group = group_of_part(told.request.group, told.number)
        transfer = self._sender.begin_with(
            replace(told.request, group=group),
            snapshot.cut(told.bucket_bytes),
            order=(told.incarnation, told.policy_version),
        )
        with self._lock:
            self._prepared[told.request.engine] = (told.request.group, transfer)
        return transfer.offer

    def _taken(self, told: Send) -> Transfer:
        with self._lock:
            group, transfer = self._prepared.get(told.engine, ("", None))
            if transfer is None or group != told.group:
                raise WeightsError(f"{told.engine} asked again, in another group than {told.group}: it was restarted")
            del self._prepared[told.engine]
            return transfer


class ModelSender:
    """See Sender in weights/port.py. Other ranks may have parts of the model."""

    def __init__(self, host: str, *, bucket_bytes: int = BUCKET_BYTES, patience_seconds: float = 60.0) -> None:
        """See nccl.Sender."""
        self._host, self._bucket_bytes, self._patience = host, bucket_bytes, patience_seconds
        self._own = PartSender()
        self._lock = threading.Lock()
        self._newest: tuple[tuple[int, int], Snapshot] | None = None

    def hold(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        with self._lock:
            self._newest = ((incarnation, policy_version), snapshot)

    def begin(self, request: TransferRequest) -> AnyTransfer:
        with self._lock:
            newest = self._newest
        if newest is None:
            raise WeightsError("the learner has no weights to send yet")
        (incarnation, policy_version), snapshot = newest
        orders = [
            PartOrder(
                begin=Begin(
                    request=request,
                    incarnation=incarnation,
                    policy_version=policy_version,
                    number=number,
                    host=self._host,
                    bucket_bytes=self._bucket_bytes,
                    patience_seconds=self._patience,
                )
            )
            for number in range(1 + len(snapshot.others))
        ]
        answers = on_every_part(snapshot, self._own, list(map(encode, orders)))
        own, *others = (decode(decode(answer, TransferOffer).payload, CollectiveOffer) for answer in answers)
        offer = TransferOffer(
            incarnation=incarnation, policy_version=policy_version, payload=encode(replace(own, others=tuple(others)))
        )
        return ModelTransfer(offer, snapshot, self._own, request=request)

    def forget(self, *, engines: Collection[str]) -> None:
        with self._lock:
            newest = self._newest
        if newest is not None:
            _, snapshot = newest
            order = encode(PartOrder(forget=Forget(engines=tuple(engines))))
            on_every_part(snapshot, self._own, [order] * (1 + len(snapshot.others)))


class ModelTransfer:
    """See Transfer in weights/port.py."""

    def __init__(self, offer: TransferOffer, snapshot: Snapshot, own: PartSender, *, request: TransferRequest) -> None:
        self.offer = offer
        self._snapshot, self._own, self._request = snapshot, own, request

    def send(self) -> None:
        found = decode(self.offer.payload, CollectiveOffer)
        parts = (found, *found.others)
        total = 8 * sum(bucket.num_elements for part in parts for bucket in part.buckets)  # upper bound
        engine, group = self._request.engine, self._request.group
        order = encode(PartOrder(send=Send(engine=engine, group=group, beside_bytes=total)))
        on_every_part(self._snapshot, self._own, [order] * len(parts))


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
