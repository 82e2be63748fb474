"""How weights get from the learner to engines. Adapters: weights/."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.messages import WeightVersion
from asyncrl.transfer_messages import TransferOffer, TransferRequest

if TYPE_CHECKING:
    from asyncrl.snapshot import Snapshot


class WeightChannel(Protocol):
    """Moves weights from the learner to wherever engines can load them. Blocking; called from a thread."""

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        """Store one version, whole or not at all, and forget versions nobody should load any more."""
        ...

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version whose checksum is right, fetched if need be. Raises WeightsError."""
        ...

    @property
    def progress(self) -> int:
        """Rises while a publish or verify gets on: a sign of life for who waits for it. Any thread may look."""
        ...

    @property
    def published_bytes(self) -> int:
        """What the last publish stored."""
        ...

    @property
    def sender(self) -> Sender | None:
        """Sends the newest weights out of memory as well; None when the channel knows folders only."""
        ...


class Sender(Protocol):
    """Holds the newest weights for engines that ask. Blocking and thread-safe."""

    def hold(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> None:
        """From now on this is what is sent."""
        ...

    def begin(self, request: TransferRequest) -> Transfer:
        """What to answer an engine, and what to do then. Raises WeightsError."""
        ...

    def forget(self, *, engines: Collection[str]) -> None:
        """Of engines that are none of these keep nothing, unless they came or took weights a moment ago."""
        ...


class Transfer(Protocol):
    """One engine's turn."""

    @property
    def offer(self) -> TransferOffer: ...

    def send(self) -> None:
        """Blocks until the engine has everything. Raises WeightsError when it does not take it."""
        ...
