"""Prompt groups that a worker holds but has not begun, and how many of them it wants.

  F1 A worker holds no more than it begins while others are on their way (policies/prefetch.py), so no worker starves
     beside a full one.
  F2 A draining worker returns them at once. Other workers can then begin them, with the newest weights.
  F3 A delivery of a group that this worker already holds was reissued for other workers, so it is returned.
  F4 A group that is returned before it begins, or without being looked at, uses up no attempt (delivery_attempts.py).
Tests: tests/actors/rollout/test_prefetch.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.actors.rollout.delivery_attempts import DeliveryAttempts
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Deliveries, Delivery
from asyncrl.errors import BusError
from asyncrl.messages import PromptGroup
from asyncrl.messages.roles import PROMPT_SOURCE
from asyncrl.policies.prefetch import groups_ahead

_WINDOW_SECONDS: Final = 10.0
_FEW: Final = 8
RETURN_SECONDS: Final = 5.0
"""Times the attempt: delay until a returned duplicate is redelivered here, if no other worker takes it."""
_LONGEST_RETURN: Final = 60.0


class PrefetchRate:
    """Measures how many groups a worker finishes and how far away its bus is, both at its acks."""

    def __init__(self) -> None:
        self._acks: deque[float] = deque()
        self._round_trips: deque[float] = deque(maxlen=_FEW)

    async def ack(self, delivery: Delivery[PromptGroup]) -> None:
        """Ack a finished group and measure the round trip."""
        asked = time.monotonic()
        await delivery.ack()
        self._acks.append(time.monotonic())
        self._round_trips.append(self._acks[-1] - asked)

    def groups_ahead(self) -> int:
        """Return how many groups to hold beyond those that have free slots."""
        old = time.monotonic() - _WINDOW_SECONDS
        while self._acks and self._acks[0] < old:
            self._acks.popleft()
        return groups_ahead(
            groups_per_second=len(self._acks) / _WINDOW_SECONDS,
            round_trip_seconds=min(self._round_trips, default=0.0),
        )


@dataclass(frozen=True, slots=True)
class Prefetched:
    """A delivery that is renewed until ``release``. attempt: as counted by delivery_attempts.py"""

    delivery: Delivery[PromptGroup]
    attempt: int
    keeping: asyncio.Task[None]
    held: set[str]

    def release(self) -> None:
        """Stop renewing: before the delivery is returned, and once it is done. A second call has no effect."""
        if not self.keeping.cancelling():
            self.keeping.cancel()
            self.held.discard(self.delivery.key)


class Prefetch:
    """The queue between fetching prompt groups and beginning them. ``owner`` runs its tasks."""

    def __init__(
        self,
        deliveries: Deliveries[PromptGroup],
        *,
        worker: str,
        slots: SampleSlots,
        attempts: DeliveryAttempts,
        groups_ahead: Callable[[], int],
        keep_seconds: float,
        owner: asyncio.TaskGroup,
        is_open: Callable[[], bool] = lambda: True,
        what: str = "prompts",
        on: str = PROMPT_SOURCE,
    ) -> None:
        """
        groups_ahead  returns how many groups to hold beyond those that have free slots
        keep_seconds  interval between renewals
        is_open       while this returns False, nothing is fetched or begun, and waiting groups are returned; call
                      ``update`` when its result changes
        what, on      what the worker waits for, and on whom
        """
        self._is_open, self._what, self._on = is_open, what, on
        deliveries.on_unread(attempts.note_unread)
        self._deliveries, self._slots, self._groups_ahead = deliveries, slots, groups_ahead
        self._attempts, self._keep_seconds, self._owner = attempts, keep_seconds, owner
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._ready: deque[Prefetched] = deque()
        self._group_size = slots.max_running  # until the first group is seen
        self._held: set[str] = set()
        self._is_over = False
        self._is_abandoned = False
        self._closed = asyncio.Event()  # set while nothing may be fetched, for now or for good
        self._changed = asyncio.Event()

    def update(self) -> None:
        """Adapt to changed slots, or to a changed result of ``is_open``."""
        if self._is_over or self._is_shut:
            self._closed.set()
        else:
            self._closed.clear()
        self._deliveries.want(max(0, self._num_wanted))
        self._changed.set()

    def end(self) -> None:
        """Begin nothing more."""
        self._is_over = True
        self.update()

    # -- fetching ----------------------------------------------------------------------------------------------------

    async def fetch(self, waits: WaitTracker) -> None:
        """consumes: prompts    waits for: a prompt, free slots    woken by: the prompt source, ``update``, ``end``

        Returns waiting groups when a group takes the worker for itself, when the queue is shut, and at the end.
        """
        while not self._is_over:
            if self._num_wanted > 0:
                with waits.waiting(self._what, on=self._on):
                    await self._fetch_one()
                continue
            await self._deliveries.stop()
            if self._is_shut:
                await self._give_back_all()
            with waits.waiting("a free slot"):
                await self._until(lambda: self._is_over or self._num_wanted > 0 or self._must_give_back)
        await self._deliveries.stop()  # messages that arrived but were not taken yet go back as well
        await self._give_back_all()

    async def _fetch_one(self) -> None:
        """Fetch one group, unless the queue is closed first."""
        taking = asyncio.ensure_future(anext(aiter(self._deliveries)))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((taking, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            if not taking.done():
                await _cancelled(taking)
        if not taking.cancelled():
            await self._add(taking.result())

    async def _add(self, delivery: Delivery[PromptGroup]) -> None:
        if delivery.key in self._held:
            await self._attempts.give_back(delivery, delay=min(_LONGEST_RETURN, RETURN_SECONDS * delivery.attempt))
            return
        self._held.add(delivery.key)
        attempt = await self._attempts.number(delivery)  # here: no await between ``next`` and taking slots
        if delivery.message is not None:
            self._group_size = delivery.message.group_size
        keeping = self._owner.create_task(self._keep(delivery))
        self._ready.append(Prefetched(delivery, attempt, keeping, self._held))
        self.update()

    @property
    def _num_wanted(self) -> int:
        if self._closed.is_set() or self._is_abandoned:
            return 0
        return -(-self._slots.num_free // self._group_size) + self._groups_ahead() - len(self._ready)

    @property
    def _is_shut(self) -> bool:
        return self._slots.is_reserved or not self._is_open()

    @property
    def _must_give_back(self) -> bool:
        return self._is_shut and bool(self._ready)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- beginning ---------------------------------------------------------------------------------------------------

    async def next(self) -> Prefetched | None:
        """Return the oldest group once a slot is free; None after ``end``."""
        try:
            await self._until(lambda: self._is_over or bool(self._ready and self._slots.has_free and self._is_open()))
        except asyncio.CancelledError:
            self._is_abandoned = True  # fetch nothing for the slots of cancelled groups
            raise
        return None if self._is_over else self._ready.popleft()

    async def _give_back_all(self) -> None:
        ready, self._ready = self._ready, deque()
        async with asyncio.TaskGroup() as group:
            for prefetched in ready:
                group.create_task(self._give_back(prefetched))

    async def _give_back(self, prefetched: Prefetched) -> None:
        prefetched.release()
        await self._attempts.give_back(prefetched.delivery)

    async def _keep(self, delivery: Delivery[PromptGroup]) -> None:
        """consumes: nothing    waits for: the next renewal    woken by: the clock

        Long generations outlast the redelivery timer of the bus, so the delivery is renewed regularly.
        """
        while True:
            await asyncio.sleep(self._keep_seconds)
            try:
                await delivery.keep()
            except BusError as error:  # at worst a second worker makes the same group, and the ledger drops the copy
                self._log.warning("group %s: could not renew the delivery: %s", delivery.key, error)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
