"""The engine's end of a channel whose engines fetch the weights with a function that runs next to the model."""

from __future__ import annotations

from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.weights.port import Ask, Intake, LoadReport, Source


class PullReceiver:
    """See Receiver in weights/port.py. No join is needed: each offer's payload contains everything."""

    def __init__(self, intake: Intake, source: Source, *, engine: str) -> None:
        """``source``: see Intake.take. ``engine``: name of the engine in the run."""
        self._intake = intake
        self._source = source
        self._engine = engine

    async def join(self, ask: Ask) -> None:
        """Do nothing: no connection is kept."""

    async def receive(self, ask: Ask) -> LoadReport:
        request = TransferRequest(
            engine=self._engine, group=self._engine, num_ranks=self._intake.num_ranks, has_joined=True
        )
        offer = await ask(request)
        return await self._intake.take(offer.order, self._source, offer.payload)
