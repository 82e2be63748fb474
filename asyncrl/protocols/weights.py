"""How weights get from the learner to engines. Adapters: weights/."""

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
    """Moves weights from the learner to wherever engines can load them. Blocking; called from a thread."""

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version atomically, and remove versions that should not be loaded any more."""
        ...

    def restore(self) -> WeightVersion | None:
        """Store the newest version again if something of it is gone: how to announce it then, None if nothing is.

        Called every few seconds between two publishes.
        """
        ...

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version with its checksum verified, fetched if need be. Raises WeightsError."""
        ...

    def retain(self, weights: WeightVersion) -> None:
        """Keep what ``verify`` needs of a version that is stored, however old it gets, until ``release``.

        The learner's end, between two calls of ``publish``.
        """
        ...

    def release(self, weights: WeightVersion) -> None:
        """The version may be removed by the next ``publish``; nothing happens if it was not retained."""
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
        """Sends the newest weights from memory; None if the channel has only folders."""
        ...

    def receiver(self, intake: Intake, *, engine: str) -> Receiver | None:
        """The end of ``sender`` at one engine, ``engine`` in the run; None when it loads folders only."""
        ...


class Sender(Protocol):
    """Sends the newest weights to engines that request them. Blocking and thread-safe."""

    def hold(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        """Set the weights to send."""
        ...

    def begin(self, request: TransferRequest) -> Transfer:
        """Accept an engine's request: the offer to reply with, and the transfer to run then. Raises WeightsError."""
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
    """The engine's side of a transfer (Sender is the learner's). What a payload says, the two of one channel know."""

    @property
    def request(self) -> TransferRequest:
        """What to ask the learner next: where to meet, or, once joined, for the weights."""
        ...

    async def join(self, offer: TransferOffer) -> None:
        """Meet the learner. Raises WeightsError."""
        ...

    async def receive(self, offer: TransferOffer) -> LoadReport:
        """Take what the learner sends now, as Engine.load takes a folder. Raises WeightsError.

        When it fails half-way the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self) -> None:
        """Forget the learner that was met: the next request asks where to meet."""
        ...
