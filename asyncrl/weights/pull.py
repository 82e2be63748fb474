"""The engine's end of a channel whose engines fetch the weights, by a function that runs where the model is."""

from __future__ import annotations

from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.protocols import Intake, LoadReport, Source


class PullReceiver:
    """See Receiver in protocols/weights.py. There is nothing to join: each offer's payload says all that is needed."""

    def __init__(self, intake: Intake, source: Source, *, engine: str) -> None:
        """``source``: see Intake.take. ``engine``: its name in the run."""
        self._intake = intake
        self._source = source
        self._engine = engine

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._engine, group=self._engine, num_ranks=self._intake.num_ranks, has_joined=True
        )

    async def join(self, offer: TransferOffer) -> None:
        """It has joined."""

    async def receive(self, offer: TransferOffer) -> LoadReport:
        return await self._intake.take(offer.order, self._source, offer.payload)

    async def leave(self) -> None:
        """It has nothing to forget."""
