"""The port of weight channels, which bring weights from the learner to engines. Adapters: weights/."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.protocols.engine import Intake, LoadReport

if TYPE_CHECKING:
    from asyncrl.tensors.snapshot import Snapshot


class WeightChannel(Protocol):
    """Brings weights from the learner to where engines can load them. Blocking; called from a thread."""

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version atomically and remove versions that should no longer be loaded."""
        ...

    def restore(self) -> WeightVersion | None:
        """Store the newest version again if part of it is gone. Return how to announce it, or None if nothing is gone.

        Called every few seconds between publishes.
        """
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

    def receiver(self, intake: Intake, *, engine: str) -> Receiver | None:
        """Return the receiving side of ``sender`` for the engine named ``engine``; None if it only loads folders."""
        ...


class Sender(Protocol):
    """Sends the newest weights to engines that request them. Blocking and thread-safe."""

    def hold(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        """Set the weights to send."""
        ...

    def begin(self, request: TransferRequest) -> Transfer:
        """Accept an engine's request. Return the transfer to run after replying with its offer. Raises WeightsError."""
        ...

    def forget(self, *, engines: Collection[str]) -> None:
        """Drop engines not in ``engines``, unless they joined or received weights very recently."""
        ...


class Transfer(Protocol):
    """One transfer to one engine."""

    @property
    def offer(self) -> TransferOffer: ...

    def send(self) -> None:
        """Block until the engine has received everything. Raises WeightsError if it does not."""
        ...


class Receiver(Protocol):
    """The engine's side of a transfer (Sender is the learner's). Only the two sides know the format of a payload."""

    @property
    def request(self) -> TransferRequest:
        """The next request to the learner: where to meet, or, once joined, the weights."""
        ...

    async def join(self, offer: TransferOffer) -> None:
        """Meet the learner. Raises WeightsError."""
        ...

    async def receive(self, offer: TransferOffer) -> LoadReport:
        """Receive the weights that the learner sends now, like Engine.load with a folder. Raises WeightsError.

        If it fails half-way, the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self) -> None:
        """Leave the group with the learner: the next request asks where to meet."""
        ...
