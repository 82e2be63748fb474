"""Asks the learner for a receiver's next transfer of weights from memory."""

from __future__ import annotations

import secrets
from typing import Final

from asyncrl.bus.port import Bus
from asyncrl.errors import WeightsError
from asyncrl.messages import replace
from asyncrl.messages.topics import TRANSFERS
from asyncrl.messages.weight_transfer import TransferOffer
from asyncrl.weights.port import Receiver

ANSWER_SECONDS: Final = 10.0
NONCE_BYTES: Final = 16


async def offered(bus: Bus, receiver: Receiver) -> TransferOffer:
    """Return the learner's offer. Raises WeightsError if no learner answers or it sends nothing."""
    request = replace(receiver.request, nonce=secrets.token_bytes(NONCE_BYTES))
    offer = await bus.ask(TRANSFERS, request, seconds=ANSWER_SECONDS)
    if offer is None:
        raise WeightsError("no learner answers the request for weights")
    if offer.problem:
        await receiver.leave()
        raise WeightsError(f"the learner sends no weights: {offer.problem}")
    return offer
