"""Prompt groups on their way to a worker: fetched, counted, kept in flight while they are made, and given back.

    topic -> Source (fetched when a slot is free) -> PromptWork (begun, renewed) -> acked, or given back

  F1 A worker holds no more groups than it has free slots for, so no worker starves beside a full one.
  F2 A draining worker returns at once what it has not begun. Other workers can then begin it, with the newest weights.
  F3 A delivery of a group that this worker already holds was reissued for other workers, so it is returned.
  F4 A group that is returned before it begins uses up no attempt (DeliveryAttempts).
Tests: tests/actors/rollout/test_prompt_deliveries.py.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import GroupProgress, PartialRollouts
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.bus.port import Bus, Deliveries, Delivery
from asyncrl.errors import BusError
from asyncrl.messages import GroupSegment, PromptGroup
from asyncrl.messages.topics import PROGRESS, SEGMENTS, Topic, group_id_of

RETRY_SECONDS: Final = 0.5
"""Delay until a group that was put back is delivered again."""
RETURN_SECONDS: Final = 5.0
"""Times the attempt: delay until a returned duplicate is redelivered here, if no other worker takes it."""
_LONGEST_RETURN: Final = 60.0


class DeliveryAttempts:
    """Counts how often a prompt group was begun. The bus counts deliveries, but not every delivery is begun.

    Each beginning is noted in ``segments`` (WORKER/GROUP/DELIVERY/begun/INCARNATION) before any of it is generated.
    Notes of a group that is published or given back are removed. What was begun under an earlier incarnation of the
    learner does not count: the machine may have gone, three times.
    """

    def __init__(self, bus: Bus, *, worker: str, max_attempts: int) -> None:
        self._bus = bus
        self._worker = worker
        self.max_attempts = max_attempts
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def number(self, delivery: Delivery[PromptGroup]) -> int:
        """Return which attempt this delivery would be, from 1."""
        if delivery.attempt == 1 or (prompt := delivery.message) is None:
            return delivery.attempt
        incarnation = await self._incarnation(delivery, prompt)
        found = await self._bus.states(SEGMENTS, under=f"*/{prompt.group_id}/")
        noted = {key.partition("/")[2] for key in found}  # whoever noted it
        return 1 + sum(_note(prompt, number, incarnation) in noted for number in range(1, delivery.attempt))

    async def begin(self, delivery: Delivery[PromptGroup], prompt: PromptGroup) -> str:
        """Note the attempt and return the note's key. Raises BusError: a prompt that kills its worker must not look as
        if it was never tried, and a harness that must not run twice (rollout.options.restart) relies on it.
        """
        key = f"{self._worker}/{_note(prompt, delivery.attempt, await self._incarnation(delivery, prompt))}"
        note = GroupSegment(group_id=prompt.group_id, worker=self._worker, calls=())
        await self._bus.put(SEGMENTS, note, key=key)
        return key

    async def forget(self, note: str) -> None:
        """Forget an attempt: its group is published, or it ended only because this worker leaves."""
        try:
            await self._bus.forget(SEGMENTS, key=note)
        except BusError as error:  # it expires after some hours
            self._log.warning("%s: this attempt stays noted: %s", note, error)

    async def _incarnation(self, delivery: Delivery[PromptGroup], prompt: PromptGroup) -> int:
        """Return the learner's incarnation; on the first delivery that of the prompt, which costs no request."""
        progress = None if delivery.attempt == 1 else (await self._bus.states(PROGRESS)).get("")
        return prompt.incarnation if progress is None else progress.incarnation


def _note(prompt: PromptGroup, delivery: int, incarnation: int) -> str:
    return f"{prompt.group_id}/{delivery}/begun/{incarnation}"


class PromptWork:
    """One prompt group that a source has fetched. Its delivery is renewed until ``release``."""

    def __init__(
        self,
        delivery: Delivery[PromptGroup],
        *,
        attempt: int,
        attempts: DeliveryAttempts,
        partial_rollouts: PartialRollouts,
        keeping: asyncio.Task[None],
        held: set[str],
    ) -> None:
        """
        attempt  as counted by ``attempts``
        keeping  the task that renews the delivery
        held     keys of the groups that the worker holds
        """
        self.delivery = delivery
        self.attempt = attempt
        self._attempts = attempts
        self._partial_rollouts = partial_rollouts
        self._keeping = keeping
        self._held = held
        self._note = ""  # key of the note of its attempt, once it has begun
        self.problem = ""
        """Why the group cannot be made and is published as failed; "" if it can."""
        if attempt > attempts.max_attempts:
            self.problem = (
                f"gave up after {attempts.max_attempts} attempts: the last worker that tried did not come back"
            )

    @property
    def group_id(self) -> int:
        """Raises AssertionError for a key that names no group; a source hands out no such work."""
        group_id = group_id_of(self.delivery.key)
        assert group_id is not None, self.delivery.key
        return group_id

    @property
    def prompt(self) -> PromptGroup | None:
        """The prompt, whose ticket the answer needs even if there is a ``problem``; None if the message is not it."""
        message = self.delivery.message
        return message if message is not None and message.group_id == self.group_id else None

    @property
    def is_last_attempt(self) -> bool:
        """Whether an engine failure now fails the group; otherwise the group is made again."""
        return self.attempt >= self._attempts.max_attempts

    @property
    def needs_worker_alone(self) -> bool:
        """Whether this is the last of several attempts: a group that ended workers must not end other groups."""
        return self.is_last_attempt and self.attempt > 1 and not self.problem

    async def begin(self) -> GroupProgress | None:
        """Called before anything is generated. Return the group's progress so far; None: nothing of it is saved."""
        assert self.prompt is not None, "a group without a prompt cannot begin"
        self._note = await self._attempts.begin(self.delivery, self.prompt)
        return await self._partial_rollouts.open(self.prompt, attempt=self.delivery.attempt, begun=self.attempt)

    async def finish(self) -> None:
        """The result is published, so the group need not be made again."""
        await self.delivery.ack()
        await self._partial_rollouts.forget(self.delivery.key)
        if self._note:
            await self._attempts.forget(self._note)

    async def retry(self) -> None:
        """Any worker may make the group again soon: this attempt failed, or did not begin."""
        self.release()
        await self.delivery.retry(delay=RETRY_SECONDS)

    async def give_back(self) -> None:
        """This worker leaves: another one should make the group, and this does not count as an attempt."""
        await self._partial_rollouts.save()
        self.release()
        if self._note:
            await self._attempts.forget(self._note)
        await self.delivery.retry()

    def release(self) -> None:
        """Stop renewing: before the delivery is returned, and once it is done. A second call has no effect."""
        if not self._keeping.cancelling():
            self._keeping.cancel()
            self._held.discard(self.delivery.key)

    def close(self) -> None:
        """Release the group. Unless ``finish`` was called, it is redelivered."""
        self.release()
        self._partial_rollouts.close(self.delivery.key)


class Source(abc.ABC):
    """Supplies the prompt groups of a stage from a topic.

    Normally a group is fetched when a slot becomes free and begins at once. It waits here only if the slot was taken in
    between, by another stage or by a group that needs the worker for itself; then it is given back.

    Example with 4 slots and groups of 2: two groups are fetched and begun. When one of the 4 samples has ended, a third
    group is fetched and begun. It takes one slot more than are free, because most samples of a group end soon.
    """

    def __init__(
        self,
        bus: Bus,
        topic: Topic[PromptGroup],
        maker: GroupMaker,
        *,
        slots: SampleSlots,
        partial_rollouts: PartialRollouts,
        keep_seconds: float,
        what: str,
        on: str,
    ) -> None:
        """
        keep_seconds  interval between renewals of a delivery
        what, on      what the worker waits for, and on whom
        """
        self._bus = bus
        self._topic = topic
        self._worker = maker.worker
        self._engine = maker.engine
        self._slots = slots
        self._partial_rollouts = partial_rollouts
        self._attempts = DeliveryAttempts(bus, worker=maker.worker, max_attempts=partial_rollouts.max_attempts)
        self._keep_seconds = keep_seconds
        self._what = what
        self._on = on
        self._log = logging.getLogger(f"asyncrl.{maker.worker}")
        self._deliveries: Deliveries[PromptGroup] | None = None
        self._ready: deque[PromptWork] = deque()
        self._group_size = slots.max_running  # until the first group is seen
        self._held: set[str] = set()
        self.is_draining = False
        self._is_abandoned = False
        self._closed = asyncio.Event()  # set while nothing may be fetched, for now or for good
        self._changed = asyncio.Event()

    # -- what a stage asks, and what a subclass answers ----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """While this is False, nothing is fetched or begun, and waiting groups are given back. Call ``update`` when it
        changes."""

    @abc.abstractmethod
    async def accept(self, work: PromptWork) -> bool:
        """Return whether a fetched group may begin here; if not, ack it or ``retry`` it. Raises BusError."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """While open, ``next`` may be called. Leaving abandons everything unfinished."""
        async with self._bus.consume(self._topic) as self._deliveries, asyncio.TaskGroup() as self._owner:
            with self._slots.watch(self.update), self._engine.gate.watch(self.update):
                self.update()
                self._owner.create_task(self._fetch(self._deliveries), name=f"{self._worker}.fetch-{self._topic.name}")
                yield

    async def next(self) -> PromptWork | None:
        """Return the oldest group that may begin, once a slot is free; None if no more will come. Raises BusError."""
        while True:
            try:
                await self._until(
                    lambda: self.is_draining or bool(self._ready and self._slots.has_free and self.is_open)
                )
            except asyncio.CancelledError:
                self._is_abandoned = True  # fetch nothing for the slots of cancelled groups
                raise
            if self.is_draining:
                return None
            if await self.accept(work := self._ready.popleft()):
                return work
            work.release()
            self.update()  # no slot was taken, so no other event requests the next prompt

    def drain(self) -> None:
        """Hand out nothing more: ``next`` returns None soon. May be called before ``open``."""
        self.is_draining = True
        self.update()

    def update(self) -> None:
        """Adapt to changed slots, or to a changed ``is_open``."""
        if self.is_draining or self._is_shut:
            self._closed.set()
        else:
            self._closed.clear()
        if self._deliveries is not None:
            self._deliveries.want(max(0, self._num_wanted))
        self._changed.set()

    # -- fetching ------------------------------------------------------------------------------------------------------

    async def _fetch(self, deliveries: Deliveries[PromptGroup]) -> None:
        """consumes: the topic    waits for: a prompt, free slots    woken by: who publishes prompts, ``update``

        Returns waiting groups when a group takes the worker for itself, when the source is shut, and at the end.
        """
        while not self.is_draining:
            if self._num_wanted > 0:
                with self._engine.waits.waiting(self._what, on=self._on):
                    await self._fetch_one(deliveries)
                continue
            await deliveries.stop()
            if self._is_shut:
                await self._give_back_all()
            with self._engine.waits.waiting("a free slot"):
                await self._until(lambda: self.is_draining or self._num_wanted > 0 or self._must_give_back)
        await deliveries.stop()  # messages that arrived but were not taken yet go back as well
        await self._give_back_all()

    async def _fetch_one(self, deliveries: Deliveries[PromptGroup]) -> None:
        """Fetch one group, unless the source is closed first."""
        taking = asyncio.ensure_future(anext(aiter(deliveries)))
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
        if delivery.key in self._held:  # reissued for other workers, while this one makes the group
            await delivery.retry(delay=min(_LONGEST_RETURN, RETURN_SECONDS * delivery.attempt))
            return
        self._held.add(delivery.key)
        attempt = await self._attempts.number(delivery)  # here: no await between ``next`` and taking slots
        if delivery.message is not None:
            self._group_size = delivery.message.group_size
        work = PromptWork(
            delivery,
            attempt=attempt,
            attempts=self._attempts,
            partial_rollouts=self._partial_rollouts,
            keeping=self._owner.create_task(self._keep(delivery)),
            held=self._held,
        )
        self._ready.append(work)
        self.update()

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

    async def _give_back_all(self) -> None:
        ready, self._ready = self._ready, deque()
        async with asyncio.TaskGroup() as group:
            for work in ready:
                work.release()
                group.create_task(work.delivery.retry())

    @property
    def _num_wanted(self) -> int:
        """Number of groups to fetch now: 3 free slots are filled by two groups of 2."""
        if self._closed.is_set() or self._is_abandoned:
            return 0
        return -(-self._slots.num_free // self._group_size) - len(self._ready)

    @property
    def _is_shut(self) -> bool:
        return self._slots.is_reserved or not self.is_open

    @property
    def _must_give_back(self) -> bool:
        return self._is_shut and bool(self._ready)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
