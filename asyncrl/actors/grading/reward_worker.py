"""The reward worker: takes generated groups, rewards them, and answers the rollout workers that asked.

Invariants (tests/actors/test_reward_worker.py):
  R1 It answers, then acks. If a worker dies in between, the request is redelivered, and a second identical answer is
     harmless.
  R2 It takes no more requests than it can begin, so none waits behind a slow judge while another worker is free.
  R3 A request on its last attempt has the worker to itself, so a request that kills workers takes no other group with
     it. After the last attempt a worker answers it with an error, and its group fails.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrl.actors.base import Actor
from asyncrl.actors.grading import pieces
from asyncrl.actors.grading.rewards_elsewhere import samples_of
from asyncrl.actors.rollout.user_tasks import contain_exits
from asyncrl.bus.port import Bus, Deliveries, Delivery
from asyncrl.errors import BusError, MessageError, RewardError
from asyncrl.messages.grading import Grades, GradingRequest
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.topics import GRADES, GRADING, PROGRESS
from asyncrl.policies.health.faults import REWARD_WORKER
from asyncrl.rewards.port import RewardFn

PIECES_SECONDS: Final = 5.0
"""Delay before looking again for pieces that are not yet, or no longer, on the bus."""


class RewardWorker(Actor):
    """consumes: grading, progress    publishes: grades    woken by: rollout workers; the learner at the end"""

    role = REWARD_WORKER

    def __init__(
        self, name: str, bus: Bus, *, reward: RewardFn, at_once: int, max_attempts: int, keep_seconds: float
    ) -> None:
        """
        at_once       number of groups graded at the same time
        max_attempts  a request delivered this often without an answer fails
        keep_seconds  interval between renewals of a delivery
        """
        super().__init__(name, bus)
        self._reward = reward
        self._at_once, self._free = at_once, asyncio.Semaphore(at_once)
        self._max_attempts = max_attempts
        self._keep_seconds = keep_seconds

    async def stop(self) -> None:
        await self._reward.close()

    async def run(self) -> None:
        """Grade until drained, or until the learner reports that the run is finished."""
        contain_exits()
        async with asyncio.TaskGroup() as group:
            ends = [
                group.create_task(self._grade_all(), name=f"{self.name}.grade"),
                group.create_task(self._until_finished(), name=f"{self.name}.until-finished"),
            ]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in ends:
                task.cancel()

    async def _grade_all(self) -> None:
        """consumes: grading    waits for: a place, then a request    woken by: finished gradings, rollout workers"""
        async with self.bus.consume(GRADING) as deliveries, asyncio.TaskGroup() as group:
            while True:
                await self._free.acquire()
                if (delivery := await self._next(deliveries)) is None:
                    return
                keeping = group.create_task(self._keep(delivery), name=f"{self.name}.keep-{delivery.key[:8]}")
                places = self._at_once if delivery.attempt == self._max_attempts > 1 else 1
                for _ in range(places - 1):  # R3; only this loop takes places, so all of them become free
                    await self._free.acquire()
                name = f"{self.name}.grade-{delivery.key[:8]}"
                group.create_task(self._grade(delivery, keeping, places=places), name=name)

    async def _next(self, deliveries: Deliveries[GradingRequest]) -> Delivery[GradingRequest] | None:
        """Wait for a request; ask the bus for one only now (R2). Return None when draining."""
        taking = asyncio.ensure_future(anext(aiter(deliveries)))
        draining = asyncio.ensure_future(self.draining.wait())
        try:
            with self.waiting("a group to grade"):
                await asyncio.wait((taking, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not taking.done():
                taking.cancel()
                await asyncio.wait((taking,))
        if self.draining.is_set() or taking.cancelled():
            return None  # a request that has arrived returns to the bus
        return taking.result()

    async def _grade(self, delivery: Delivery[GradingRequest], keeping: asyncio.Task[None], *, places: int) -> None:
        """Grade one delivery. Raises BusError; a request that cannot be answered goes to another worker."""
        try:
            if (grades := await self._grades(delivery)) is None:
                await delivery.retry(delay=PIECES_SECONDS)
                return
            await self.bus.put(GRADES, grades, key=delivery.key)
            await delivery.ack()
            if delivery.message is not None:
                await pieces.remove(self.bus, delivery.message, key=delivery.key)
        finally:
            keeping.cancel()
            for _ in range(places):
                self._free.release()

    async def _grades(self, delivery: Delivery[GradingRequest]) -> Grades | None:
        """Return the answer to a request; None if it must be retried later."""
        if delivery.attempt > self._max_attempts:
            return self._failed(
                f"gave up after {self._max_attempts} attempts: the last reward worker did not come back"
            )
        if delivery.message is None:
            return self._undecoded(delivery.problem)
        try:
            request = await pieces.whole(self.bus, delivery.message, key=delivery.key)
        except MessageError as error:
            return self._undecoded(str(error))
        if request is None:
            is_last = delivery.attempt == self._max_attempts
            return self._undecoded("pieces of it are not on the bus") if is_last else None
        try:
            with self.waiting("its reward function", on="reward"):
                rewards = await self._reward(samples_of(request))
        except RewardError as error:
            self.log.warning("a group of %s failed: %s", request.worker, error, exc_info=error.__cause__)
            return self._failed(str(error))
        return Grades(
            rewards=tuple(reward.value for reward in rewards),
            parts=tuple(dict(reward.parts) for reward in rewards),
            worker=self.name,
        )

    def _undecoded(self, problem: str) -> Grades:
        self.bus.rejections.note(GRADING.name, problem)
        return self._failed(f"the request does not decode: {problem}")

    def _failed(self, problem: str) -> Grades:
        return Grades(error=problem[:LONGEST_ERROR].encode(errors="replace").decode(), worker=self.name)

    async def _keep(self, delivery: Delivery[GradingRequest]) -> None:
        """consumes: nothing    waits for: the next renewal    woken by: the clock"""
        while True:
            await asyncio.sleep(self._keep_seconds)
            try:
                await delivery.keep()
            except BusError as error:  # at worst a second worker grades it and stores its answer under the same key
                self.log.warning("could not renew a delivery: %s", error)

    async def _until_finished(self) -> None:
        """consumes: progress    waits for: the end of the run    woken by: the learner"""
        async with self.bus.watch(PROGRESS) as states:
            while not (await anext(states)).finished:
                pass
