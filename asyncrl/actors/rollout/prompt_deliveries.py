"""Prompt groups on their way to a worker: fetched, counted, kept in flight while they are made, and given back.

  F1 A worker holds no more groups than it has free slots for, so no worker starves beside a full one.
  F2 A draining worker returns at once what it has not begun. Other workers can then begin it, with the newest weights.
  F3 A delivery of a group that this worker already holds was reissued for other workers, so it is returned.
  F4 A group that is returned before it begins, or without being looked at, uses up no attempt (DeliveryAttempts).
Tests: tests/actors/rollout/test_prompt_deliveries.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncrl.actors.rollout.partial_rollouts import GroupProgress, PartialRollouts
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus, Deliveries, Delivery
from asyncrl.errors import BusError
from asyncrl.messages import GroupSegment, PromptGroup
from asyncrl.messages.roles import PROMPT_SOURCE
from asyncrl.messages.topics import SEGMENTS

RETRY_SECONDS: Final = 0.5
"""Delay until a group that was put back is delivered again."""
RETURN_SECONDS: Final = 5.0
"""Times the attempt: delay until a returned duplicate is redelivered here, if no other worker takes it."""
_LONGEST_RETURN: Final = 60.0


class DeliveryAttempts:
    """Counts how often a prompt group was begun. The bus counts deliveries, but not every delivery is begun.

    Each delivery after the first is noted in ``segments`` (GROUP/DELIVERY/begun) before any of it is generated. The
    first delivery counts as begun without a note, so groups that never fail cost nothing. It does not count if a note
    says that its worker returned it before beginning it, or even without looking at it (GROUP/1/returned). With
    ``max_attempts`` = 1 the first delivery is noted like the others.
    """

    def __init__(self, bus: Bus, *, worker: str, max_attempts: int) -> None:
        self._bus = bus
        self._worker = worker
        self.max_attempts = max_attempts
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._first_noted = min(2, max_attempts)

    async def number(self, delivery: Delivery[PromptGroup]) -> int:
        """Return which attempt this delivery would be, from 1."""
        if delivery.attempt == 1 or delivery.message is None:
            return delivery.attempt
        group_id = delivery.message.group_id
        found = await self._bus.states(SEGMENTS, under=f"{group_id}/")
        noted = sum(_begun_key(group_id, number) in found for number in range(self._first_noted, delivery.attempt))
        return self._first_noted + noted - (_returned_key(group_id) in found)

    async def begin(self, delivery: Delivery[PromptGroup]) -> None:
        """Note the attempt. Raises BusError: a prompt that kills its worker must not look as if it was never tried."""
        if delivery.attempt >= self._first_noted and delivery.message is not None:
            await self._note(delivery.message, _begun_key(delivery.message.group_id, delivery.attempt))

    async def give_back(self, delivery: Delivery[PromptGroup], *, has_begun: bool = False, delay: float = 0.0) -> None:
        """Return the delivery for redelivery after ``delay`` seconds, without using up an attempt.

        has_begun  ``begin`` was called, but the group ended only because this worker leaves
        """
        try:
            if delivery.attempt < self._first_noted:
                await self.note_unread(delivery, is_sure=True)
            elif has_begun and delivery.message is not None:
                await self._bus.forget(SEGMENTS, key=_begun_key(delivery.message.group_id, delivery.attempt))
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
        """Forget a published group. Notes of later deliveries go with its segments (PartialRollouts)."""
        if delivery.attempt == self._first_noted == 1 and delivery.message is not None:
            try:
                await self._bus.forget(SEGMENTS, key=_begun_key(delivery.message.group_id, 1))
            except BusError as error:  # the note expires after some hours
                self._log.warning(
                    "group %s: its start record stays on the bus until it expires: %s", delivery.key, error
                )


def _begun_key(group_id: int, delivery: int) -> str:
    return f"{group_id}/{delivery}/begun"


def _returned_key(group_id: int) -> str:
    return f"{group_id}/1/returned"


@dataclass(frozen=True, slots=True)
class Prefetched:
    """A delivery that is renewed until ``release``.

    attempt  as counted by DeliveryAttempts
    keeping  the task that renews it
    held     keys of the groups that the worker holds
    """

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
    """The queue between fetching prompt groups and beginning them. ``owner`` runs its tasks.

    Normally a group is fetched when a slot becomes free and begins at once. It waits here only if the slot was taken in
    between, by another stage or by a group that needs the worker for itself; then it is given back.
    """

    def __init__(
        self,
        deliveries: Deliveries[PromptGroup],
        *,
        worker: str,
        slots: SampleSlots,
        attempts: DeliveryAttempts,
        keep_seconds: float,
        owner: asyncio.TaskGroup,
        is_open: Callable[[], bool] = lambda: True,
        what: str = "prompts",
        on: str = PROMPT_SOURCE,
    ) -> None:
        """
        keep_seconds  interval between renewals
        is_open       while this returns False, nothing is fetched or begun, and waiting groups are returned; call
                      ``update`` when its result changes
        what, on      what the worker waits for, and on whom
        """
        deliveries.on_unread(attempts.note_unread)
        self._deliveries = deliveries
        self._slots = slots
        self._attempts = attempts
        self._keep_seconds = keep_seconds
        self._owner = owner
        self._is_open = is_open
        self._what = what
        self._on = on
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
                taking.cancel()
                await asyncio.wait((taking,))
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
        return -(-self._slots.num_free // self._group_size) - len(self._ready)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """One prompt group in flight. A WorkItem (stage.py)."""

    group_id: int
    prompt: PromptGroup | None
    problem: str
    prefetched: Prefetched
    attempts: DeliveryAttempts
    partial_rollouts: PartialRollouts

    @classmethod
    def from_delivery(
        cls,
        prefetched: Prefetched,
        *,
        group_id: int,
        problem: str,
        attempts: DeliveryAttempts,
        partial_rollouts: PartialRollouts,
    ) -> PromptWork:
        """problem: why the message is not the group's prompt, or """ ""
        prompt = None if problem else prefetched.delivery.message
        if not problem and prefetched.attempt > attempts.max_attempts:
            problem = f"gave up after {attempts.max_attempts} attempts: the last worker that tried did not come back"
        return cls(
            group_id=group_id,
            prompt=prompt,
            problem=problem,
            prefetched=prefetched,
            attempts=attempts,
            partial_rollouts=partial_rollouts,
        )

    @property
    def attempt(self) -> int:
        return self.prefetched.attempt

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt >= self.attempts.max_attempts

    @property
    def needs_worker_alone(self) -> bool:
        """Whether this is the last of several attempts: a group that ended workers must not end other groups."""
        return self.is_last_attempt and self.attempt > 1 and not self.problem

    async def begin(self) -> GroupProgress:
        assert self.prompt is not None, "a group without a prompt cannot begin"
        delivery = self.prefetched.delivery
        await self.attempts.begin(delivery)
        return await self.partial_rollouts.open(self.prompt, attempt=delivery.attempt, begun=self.attempt)

    async def finish(self) -> None:
        delivery = self.prefetched.delivery
        await delivery.ack()
        await self.partial_rollouts.forget(delivery.key)
        await self.attempts.forget(delivery)

    async def retry(self) -> None:
        self.prefetched.release()
        await self.prefetched.delivery.retry(delay=RETRY_SECONDS)

    async def give_back(self) -> None:
        await self.partial_rollouts.save()
        self.prefetched.release()
        await self.attempts.give_back(self.prefetched.delivery, has_begun=True)

    def close(self) -> None:
        self.prefetched.release()
        self.partial_rollouts.close(self.prefetched.delivery.key)
