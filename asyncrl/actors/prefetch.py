"""Prompt groups that are on loan to a worker and not begun, and how many of them it wants.

  F1 no more than it begins while others are on their way (policies/prefetch.py): nobody starves beside a full worker
  F2 who drains gives them back at once; they begin nowhere else before, and with the newest weights when they do
  F3 a group that was not begun has used up no attempt but the first (attempts.py)
Tests: tests/test_prefetch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.actors.occupancy import Room
from asyncrl.errors import BusError
from asyncrl.messages import PromptGroup
from asyncrl.policies.faults import PROMPT_SOURCE
from asyncrl.policies.prefetch import groups_ahead
from asyncrl.protocols import Deliveries, Delivery

_WINDOW_SECONDS: Final = 10.0
_FEW: Final = 8


class Pace:
    """What a worker finishes, and how far away its bus is: both from its acks."""

    def __init__(self) -> None:
        self._acks: deque[float] = deque()
        self._round_trips: deque[float] = deque(maxlen=_FEW)

    async def ack(self, delivery: Delivery[PromptGroup]) -> None:
        """Of a group that is finished."""
        asked = time.monotonic()
        await delivery.ack()
        self._acks.append(time.monotonic())
        self._round_trips.append(self._acks[-1] - asked)

    def groups_ahead(self) -> int:
        old = time.monotonic() - _WINDOW_SECONDS
        while self._acks and self._acks[0] < old:
            self._acks.popleft()
        return groups_ahead(
            groups_per_second=len(self._acks) / _WINDOW_SECONDS,
            round_trip_seconds=min(self._round_trips, default=0.0),
        )


@dataclass(frozen=True, slots=True)
class Loan:
    """A prompt group, kept on loan by ``keeping`` until it is done or given back."""

    delivery: Delivery[PromptGroup]
    keeping: asyncio.Task[None]


class Prefetch:
    """Between what fetches and what begins. ``owner`` has its tasks."""

    def __init__(
        self,
        deliveries: Deliveries[PromptGroup],
        *,
        worker: str,
        room: Room,
        ahead: Callable[[], int],
        keep_seconds: float,
        owner: asyncio.TaskGroup,
    ) -> None:
        """``ahead``: groups wanted beyond those there is room for."""
        self._deliveries, self._room, self._ahead = deliveries, room, ahead
        self._keep_seconds, self._owner = keep_seconds, owner
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._waiting: deque[Loan] = deque()
        self._group_size = room.max_running  # until one is seen
        self._closed = asyncio.Event()  # nothing is to be fetched, for now or for good
        self._is_over = False
        self._changed = asyncio.Event()
        room.on_change = self._tell

    # -- what fetches ------------------------------------------------------------------------------------------------

    async def fetch(self, waiting: Callable[..., contextlib.AbstractContextManager[Any]]) -> None:
        """consumes: prompts    waits for: one that is wanted    woken by: the prompt source, and free places

        waiting: the worker's. Returns after ``end``; what waited then has gone to others.
        """
        while not self._is_over:
            if self._wanted() <= 0:
                await self._deliveries.stop()
                with waiting("room for another group"):
                    await self._until(lambda: self._wanted() > 0 or self._is_over)
            else:
                with waiting("prompts", on=PROMPT_SOURCE):
                    await self._fetch_one()
        await self.give_back()

    async def _fetch_one(self) -> None:
        """One, unless ``end`` or ``held`` come first."""
        taking = asyncio.ensure_future(anext(aiter(self._deliveries)))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((taking, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            if not taking.done():
                await _ended(taking)
        if not taking.cancelled():
            self._add(taking.result())

    def _add(self, delivery: Delivery[PromptGroup]) -> None:
        if delivery.message is not None:
            self._group_size = delivery.message.group_size
        self._waiting.append(Loan(delivery, self._owner.create_task(self._keep(delivery))))
        self._tell()

    def end(self) -> None:
        """Nothing more begins."""
        self._is_over = True
        self._closed.set()
        self._tell()

    def _wanted(self) -> int:
        if self._closed.is_set():
            return 0
        return -(-self._room.free_places // self._group_size) + self._ahead() - len(self._waiting)

    def _tell(self) -> None:
        self._deliveries.want(max(0, self._wanted()))
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- what begins -------------------------------------------------------------------------------------------------

    async def next(self) -> Loan | None:
        """The oldest that waits, once there is room for it; None when no more will come."""
        await self._until(lambda: self._is_over or bool(self._waiting and self._room.has_place))
        if self._is_over:
            return None
        return self._waiting.popleft()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside, nothing more is fetched, and what waited has gone to others."""
        self._closed.set()
        try:
            await self.give_back()
            yield
        finally:
            if not self._is_over:
                self._closed.clear()
            self._tell()

    async def give_back(self) -> None:
        given, self._waiting = self._waiting, deque()
        async with asyncio.TaskGroup() as words:
            for loan in given:
                words.create_task(self._give_back(loan))

    async def _give_back(self, loan: Loan) -> None:
        try:
            await loan.delivery.retry()
        finally:
            loan.keeping.cancel()

    async def _keep(self, delivery: Delivery[PromptGroup]) -> None:
        """Long generations outlive the bus's patience: say regularly that somebody is at it."""
        while True:
            await asyncio.sleep(self._keep_seconds)
            try:
                await delivery.keep()
            except BusError as error:  # the worst that follows is a second copy, which the ledger drops
                self._log.warning("group %s: could not renew the loan: %s", delivery.key, error)


async def _ended(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
