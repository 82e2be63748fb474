"""The sample slots of a worker: how many samples it has in progress, shared by all of its stages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class SampleSlots:
    """Counted in samples, not groups: most of a group is done long before its longest sample, and the slots that it
    frees are taken at once.

    A group may take the worker for itself (``take_alone``). From then until it is done no other group gets slots.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._running = 0
        self._num_reservations = 0
        self._alone = asyncio.Lock()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def has_free(self) -> bool:
        """A group may take slots. It may take more than are free: all but one of its own samples are over soon."""
        return self._running < self.max_running and not self.is_reserved

    @property
    def num_free(self) -> int:
        return max(0, self.max_running - self._running)

    @property
    def is_reserved(self) -> bool:
        """A group has the worker for itself, or waits until it has."""
        return self._num_reservations > 0

    async def take(self, count: int) -> SlotLease:
        """Slots for ``count`` samples, once one is free."""
        while not self.has_free:
            await self._until_changed()
        return self._leased(count)

    async def take_alone(self, count: int) -> SlotLease:
        """Slots for ``count`` samples, once no other sample is in progress; nothing else begins before it is done."""
        self._num_reservations += 1
        self._notify()
        try:
            await self._alone.acquire()
        except BaseException:
            self._end_reservation()
            raise
        lease = SlotLease(self, on_close=self._leave_alone)
        try:
            while self._running:
                await self._until_changed()
        except BaseException:
            lease.close()
            raise
        lease.add(count)
        return lease

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Inside, ``on_change`` is called after every change."""
        self._listeners.append(on_change)
        try:
            yield
        finally:
            self._listeners.remove(on_change)

    def change(self, count: int) -> None:
        """The lease's: that many more samples are in progress, or fewer."""
        self._running += count
        self._notify()

    def _leased(self, count: int) -> SlotLease:
        lease = SlotLease(self)
        lease.add(count)
        return lease

    def _leave_alone(self) -> None:
        self._alone.release()
        self._end_reservation()

    def _end_reservation(self) -> None:
        self._num_reservations -= 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        for on_change in list(self._listeners):
            on_change()

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class SlotLease:
    """The slots of one group: given back one by one as its samples end, what is left when it is done."""

    def __init__(self, slots: SampleSlots, *, on_close: Callable[[], None] = lambda: None) -> None:
        self._slots, self._on_close = slots, on_close
        self._count = 0
        self._is_closed = False

    def add(self, count: int) -> None:
        self._count += count
        self._slots.change(count)

    def release(self) -> None:
        """One sample is done."""
        self.add(-1)

    def close(self) -> None:
        """The group is done."""
        if not self._is_closed:
            self._is_closed = True
            self.add(-self._count)
            self._on_close()
