"""The ports that bring weights to engines: the channel, and the weight updater of an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest

if TYPE_CHECKING:
    import torch

    from asyncrl.tensors.snapshot import Snapshot

Source: TypeAlias = "Callable[[bytes, torch.device], Iterator[tuple[str, torch.Tensor]]]"
"""Yields a model's tensors received from the learner: see WeightUpdater.update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """pause_seconds: time without decoding; load_seconds: time from the request until the new weights sample."""

    pause_seconds: float
    load_seconds: float


class WeightChannel(Protocol):
    """Brings weights from the learner to where engines can load them. Blocking; called from a thread."""

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version atomically and remove versions that should no longer be loaded."""
        ...

    def must_store(self, policy_version: int) -> bool:
        """Whether ``publish`` must be called for this version although nobody has asked for its folder."""
        ...

    def verify(self, weights: WeightVersion) -> Path:
        """Return the folder of a version, fetched if needed and with its checksum verified. Raises WeightsError."""
        ...

    def retain(self, weights: WeightVersion) -> None:
        """Keep everything ``verify`` needs of a stored version until ``release``, however old the version gets.

        Called on the learner's side, between two calls of ``publish``.
        """
        ...

    def release(self, weights: WeightVersion) -> None:
        """Let the next ``publish`` remove the version; does nothing if it was not retained."""
        ...

    @property
    def progress(self) -> int:
        """A counter that rises while a publish or verify makes progress. May be read from any thread."""
        ...

    @property
    def published_bytes(self) -> int:
        """Bytes stored by the last publish."""
        ...

    @property
    def sender(self) -> Sender | None:
        """Sends the newest weights from memory; None if the channel supports only folders."""
        ...

    def receiver(self, updater: WeightUpdater, *, engine: str) -> Receiver | None:
        """Return the receiving side of ``sender`` for the engine named ``engine``; None if it only loads folders."""
        ...


class Sender(Protocol):
    """Sends the newest weights to engines that request them. Blocking and thread-safe."""

    def set_weights(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        """Set the weights to send."""
        ...

    def withdraw(self) -> None:
        """Let go of the weights, as new ones are being exported: their copy may take the memory of the old ones.

        ``begin`` waits for the new ones. Transfers that have begun go on.
        """
        ...

    def begin(self, request: TransferRequest) -> Transfer:
        """Accept an engine's request. Return the transfer to run after replying with its offer. Raises WeightsError."""
        ...

    def forget(self, *, engines: Collection[str]) -> None:
        """Drop engines not in ``engines``, unless they joined or received weights very recently."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer to one engine.

    offer  the answer to the engine
    send   blocks until the engine has received everything; raises WeightsError if it does not
    """

    offer: TransferOffer
    send: Callable[[], None]


Ask: TypeAlias = "Callable[[TransferRequest], Awaitable[TransferOffer]]"
"""Asks the learner, and returns its offer. Raises WeightsError if it does not answer or sends nothing."""


class Receiver(Protocol):
    """The engine's side of a transfer (Sender is the learner's). Only the two sides know the format of a payload."""

    async def join(self, ask: Ask) -> None:
        """Meet the learner, if it was not met yet. Raises WeightsError."""
        ...

    async def receive(self, ask: Ask) -> LoadReport:
        """Ask for the learner's newest weights and switch to them, like Engine.load with a folder. Raises WeightsError.

        After a failure the learner must be met again. If weights arrived in part, the engine stays paused until a load
        succeeds: it never samples from mixed weights.
        """
        ...


class WeightUpdater(Protocol):
    """Moves weights from another process's memory into an engine. A weight channel's Receiver directs it."""

    @property
    def num_ranks(self) -> int:
        """Number of engine processes that hold the model."""
        ...

    @property
    def can_update(self) -> bool:
        """Whether ``update`` works; an SGLang server that asyncrl did not launch lacks the loader."""
        ...

    async def update(self, version: tuple[int, int], source: Source, payload: bytes) -> LoadReport:
        """Switch to the tensors that ``source`` yields, like Engine.load with a folder.

        ``source(payload, device)`` is called in each process of the engine, so it must be a top-level function of a
        module that they can import. It yields (name, tensor) for every tensor of the model, each complete and on
        ``device``. The engine owns the tensors from then on: ``source`` must not reuse their memory. Raises
        WeightsError, or EngineDied: in a server, an error in ``source`` may leave torn weights.
        """
        ...


@runtime_checkable
class BroadcastUpdater(WeightUpdater, Protocol):
    """The weight updater of an engine that also takes broadcasts of the learner.

    Its processes are ranks 1 and up of torch.distributed groups, with a rank of the learner as rank 0.
    """

    @property
    def buckets_at_once(self) -> int:
        """Number of buckets of NCCL groups that the engine has in memory at a time. The learner makes them smaller."""
        ...

    async def join(self, group: str, *, host: str, port: int, kind: str) -> None:
        """Join the learner, which listens at host:port, in a group of ``kind`` nccl or gloo. Raises WeightsError."""
        ...

    async def receive(
        self, version: tuple[int, int], parts: Sequence[tuple[str, Sequence[BucketLayout]]]
    ) -> LoadReport:
        """Receive the buckets that the learner broadcasts now: each group's own buckets, one group after the other.

        All buckets belong to one version; the engine switches when it has the last one. Raises WeightsError.

        If it fails half-way, the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self, group: str) -> None: ...
