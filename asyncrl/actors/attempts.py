"""How often a prompt group was begun. The bus counts how often it was lent, and who leaves may never have begun it.

A delivery after the first is noted in ``segments`` (GROUP/DELIVERY/begun) before anything of it is generated; the first
counts as begun, so that groups that nobody failed cost nothing. Where a group has one attempt alone the first is noted
too. Tests: tests/test_prefetch.py, test_a_delivery_that_never_began_buries_nothing.
"""

from __future__ import annotations

import logging

from asyncrl.errors import BusError
from asyncrl.messages import GroupSegment, PromptGroup
from asyncrl.protocols import Bus, Delivery
from asyncrl.topics import SEGMENTS


class Attempts:
    """Of the groups that one worker holds."""

    def __init__(self, bus: Bus, *, worker: str, max_attempts: int) -> None:
        self._bus, self._worker = bus, worker
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._first_noted = min(2, max_attempts)

    async def number(self, delivery: Delivery[PromptGroup]) -> int:
        """Which one this is, from 1."""
        if delivery.attempt == 1 or delivery.message is None:
            return delivery.attempt
        found = await self._bus.states(SEGMENTS, under=f"{delivery.message.group_id}/")
        noted = sum(_key(delivery.message.group_id, one) in found for one in range(self._first_noted, delivery.attempt))
        return self._first_noted + noted

    async def begin(self, delivery: Delivery[PromptGroup]) -> None:
        """Raises BusError: a prompt that kills its worker must not look as if it had never been tried."""
        if delivery.attempt >= self._first_noted and delivery.message is not None:
            note = GroupSegment(group_id=delivery.message.group_id, worker=self._worker, calls=())
            await self._bus.put(SEGMENTS, note, key=_key(note.group_id, delivery.attempt))

    async def forget(self, delivery: Delivery[PromptGroup]) -> None:
        """The group is published. Of one that came again salvage.py takes everything off the bus."""
        if delivery.attempt == self._first_noted == 1 and delivery.message is not None:
            try:
                await self._bus.forget(SEGMENTS, key=_key(delivery.message.group_id, 1))
            except BusError as error:  # it goes by itself in some hours
                self._log.warning("group %s: the note that it was begun stays on the bus: %s", delivery.key, error)


def _key(group_id: int, delivery: int) -> str:
    return f"{group_id}/{delivery}/begun"
