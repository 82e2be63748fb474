"""The engine's end of the nccl channel, and the messages between its two ends. The sender is in nccl.py."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import MessageError, WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.validation import require
from asyncrl.messages.weight_transfer import BucketLayout, TransferOffer, TransferRequest
from asyncrl.weights.port import Ask, Collectives, LoadReport

_REACH_SECONDS: Final = 5.0
_MOST_BUCKETS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """Payload of a request.  buckets_at_once: see Collectives in weights/port.py"""

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


class CollectiveReceiver:
    """See Receiver in weights/port.py. The engine keeps a group with every exporting rank until a failure."""

    def __init__(self, collectives: Collectives, *, engine: str, num_ranks: int) -> None:
        """``engine``: name of the engine in the run."""
        self._collectives = collectives
        self._engine = engine
        self._num_ranks = num_ranks
        self._group = ""
        self._has_joined = False
        self._rename()

    async def join(self, ask: Ask) -> None:
        if self._has_joined:
            return
        own = _decode_offer(await ask(self.request))
        parts = (own, *own.others)
        for found in parts:
            await _reach(found.host, found.port)  # otherwise the engine might block for minutes
        try:
            for number, found in enumerate(parts):
                group = group_of_part(self._group, number)
                await self._collectives.join(group, host=found.host, port=found.port, kind=found.collective)
                self._joined.append(group)
        except WeightsError:
            await self.leave()
            raise
        self._has_joined = True

    async def receive(self, ask: Ask) -> LoadReport:
        try:
            offer = await ask(self.request)
            own = _decode_offer(offer)
            parts = [(group_of_part(self._group, number), one.buckets) for number, one in enumerate((own, *own.others))]
            return await self._collectives.receive(offer.order, parts)
        except WeightsError:
            await self.leave()
            raise

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._engine,
            group=self._group,
            num_ranks=self._num_ranks,
            has_joined=self._has_joined,
            payload=encode(CollectiveRequest(buckets_at_once=self._collectives.buckets_at_once)),
        )

    async def leave(self) -> None:
        """Leave all groups; the next request is for new ones."""
        left = self._joined
        self._rename()
        for group in left:
            await self._collectives.leave(group)

    def _rename(self) -> None:
        self._group = f"{self._engine}-{uuid.uuid4().hex[:8]}"
        self._joined: list[str] = []
        self._has_joined = False


def _decode_offer(offer: TransferOffer) -> CollectiveOffer:
    try:
        return decode(offer.payload, CollectiveOffer)
    except MessageError as error:
        raise WeightsError(f"the learner's offer is none of this channel: {error}") from error


async def _reach(host: str, port: int) -> None:
    """Raise WeightsError if no server listens at the address."""
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer in {_REACH_SECONDS:g} s"
        raise WeightsError(
            f"cannot reach the learner at {host}:{port}: {reason}; set weights.options.host to its address as "
            "engines see it"
        ) from error
    writer.close()
