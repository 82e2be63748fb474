"""Counts how often a prompt group was begun. The bus counts deliveries, but not every delivery is begun.

Each delivery after the first is noted in ``segments`` (GROUP/DELIVERY/begun) before any of it is generated. The first
delivery counts as begun without a note, so groups that never fail cost nothing. It does not count if a note says that
its worker returned it before beginning it, or even without looking at it (GROUP/1/returned). With ``max_attempts`` = 1
the first delivery is noted like the others.
Tests: tests/actors/rollout/test_prefetch.py, test_a_delivery_that_never_began_fails_nothing and
test_what_is_given_back_before_it_began_has_used_no_attempt.
"""

from __future__ import annotations

import logging

from asyncrl.bus.port import Bus, Delivery
from asyncrl.errors import BusError
from asyncrl.messages import GroupSegment, PromptGroup
from asyncrl.messages.topics import SEGMENTS


class DeliveryAttempts:
    """Counts the attempts at the groups of one worker."""

    def __init__(self, bus: Bus, *, worker: str, max_attempts: int) -> None:
        self._bus, self._worker = bus, worker
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._first_noted = min(2, max_attempts)

    async def number(self, delivery: Delivery[PromptGroup]) -> int:
        """Return which attempt this delivery would be, from 1."""
        if delivery.attempt == 1 or delivery.message is None:
            return delivery.attempt
        group_id = delivery.message.group_id
        found = await self._bus.states(SEGMENTS, under=f"{group_id}/")
        noted = sum(_key(group_id, number) in found for number in range(self._first_noted, delivery.attempt))
        return self._first_noted + noted - (_returned_key(group_id) in found)

    async def begin(self, delivery: Delivery[PromptGroup]) -> None:
        """Note the attempt. Raises BusError: a prompt that kills its worker must not look as if it was never tried."""
        if delivery.attempt >= self._first_noted and delivery.message is not None:
            await self._note(delivery.message, _key(delivery.message.group_id, delivery.attempt))

    async def give_back(self, delivery: Delivery[PromptGroup], *, has_begun: bool = False, delay: float = 0.0) -> None:
        """Return the delivery for redelivery after ``delay`` seconds, without using up an attempt.

        has_begun  ``begin`` was called, but the group ended only because this worker leaves
        """
        try:
            if delivery.attempt < self._first_noted:
                await self.note_unread(delivery, is_sure=True)
            elif has_begun and delivery.message is not None:
                await self._bus.forget(SEGMENTS, key=_key(delivery.message.group_id, delivery.attempt))
        except BusError as error:  # the group has one attempt less
            self._log.warning(
                "group %s: cannot record that it was not started, so it has one attempt less: %s", delivery.key, error
            )
        await delivery.retry(delay=delay)

    async def note_unread(self, delivery: Delivery[PromptGroup], *, is_sure: bool = False) -> None:
        """Note that the first delivery returns unread. ``is_sure`` False does not wait for the bus: if the note is
        lost, the group has one attempt less."""
        if delivery.attempt < self._first_noted and delivery.message is not None:
            await self._note(delivery.message, _returned_key(delivery.message.group_id), is_sure=is_sure)

    async def _note(self, prompt: PromptGroup, key: str, *, is_sure: bool = True) -> None:
        note = GroupSegment(group_id=prompt.group_id, worker=self._worker, calls=())
        await self._bus.put(SEGMENTS, note, key=key, is_sure=is_sure)

    async def forget(self, delivery: Delivery[PromptGroup]) -> None:
        """Forget a published group. Notes of later deliveries go with its segments (partial_rollouts.py)."""
        if delivery.attempt == self._first_noted == 1 and delivery.message is not None:
            try:
                await self._bus.forget(SEGMENTS, key=_key(delivery.message.group_id, 1))
            except BusError as error:  # the note expires after some hours
                self._log.warning(
                    "group %s: its start record stays on the bus until it expires: %s", delivery.key, error
                )


def _key(group_id: int, delivery: int) -> str:
    return f"{group_id}/{delivery}/begun"


def _returned_key(group_id: int) -> str:
    return f"{group_id}/1/returned"
