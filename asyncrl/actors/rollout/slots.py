"""The sample slots of a worker: how many samples a stage has in progress, and which group has the worker alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class SampleSlots:
    """Counts samples, not groups: most samples of a group end long before its longest one, and the slots that they free
    are reused at once.

    A group may take the worker for itself (``take_alone``). From then until it is done, no other group of any stage
    gets slots.
    """

    def __init__(self, max_running: int, *, beside: SampleSlots | None = None) -> None:
        """beside: slots of another stage of the same worker; each counts its own samples"""
        self.max_running = max_running
        self._running = 0
        self._worker: _Worker = _Worker() if beside is None else beside._worker

    @property
    def has_free(self) -> bool:
        """Whether a group may take slots. It may take more than are free, because most of its samples end soon."""
        return self.num_free > 0 and not self.is_reserved

    @property
    def num_free(self) -> int:
        return max(0, self.max_running - self._running)

    @property
    def num_running_beside(self) -> int:
        """Samples in progress in the worker's other stages."""
        return self._worker.num_running - self._running

    @property
    def is_reserved(self) -> bool:
        """Whether a group has the worker for itself, or waits for that."""
        return self._worker.num_reservations > 0

    async def until_unreserved(self) -> None:
        """Wait until no group has the worker for itself or waits for that."""
        while self.is_reserved:
            await self._worker.until_changed()

    async def take(self, count: int) -> SlotLease:
        """Take slots for ``count`` samples once one slot is free."""
        while not self.has_free:
            await self._worker.until_changed()
        return self._lease(count)

    async def take_alone(self, count: int) -> SlotLease:
        """Take slots for ``count`` samples once no other sample is in progress; others begin only after the group."""
        self._worker.reserve(1)
        try:
            await self._worker.alone.acquire()
        except BaseException:
            self._worker.reserve(-1)
            raise
        lease = SlotLease(self, on_close=self._leave_alone)
        try:
            while self._worker.num_running:
                await self._worker.until_changed()
        except BaseException:
            lease.close()
            raise
        lease.add(count)
        return lease

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While open, call ``on_change`` after every change, including those of other stages."""
        self._worker.listeners.append(on_change)
        try:
            yield
        finally:
            self._worker.listeners.remove(on_change)

    def change(self, count: int) -> None:
        """Used by leases: ``count`` more samples are in progress, or fewer if negative."""
        self._running += count
        self._worker.run(count)

    def _lease(self, count: int) -> SlotLease:
        lease = SlotLease(self)
        lease.add(count)
        return lease

    def _leave_alone(self) -> None:
        self._worker.alone.release()
        self._worker.reserve(-1)


class _Worker:
    """State shared by the slots of all stages of a worker."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_reservations = 0
        self.alone = asyncio.Lock()
        self.listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    def run(self, count: int) -> None:
        self.num_running += count
        self._notify()

    def reserve(self, count: int) -> None:
        self.num_reservations += count
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        for on_change in list(self.listeners):
            on_change()

    async def until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class SlotLease:
    """The slots of one group: released one by one as its samples end, the rest when the group is done."""

    def __init__(self, slots: SampleSlots, *, on_close: Callable[[], None] = lambda: None) -> None:
        self._slots = slots
        self._on_close = on_close
        self._count = 0
        self._is_closed = False

    def add(self, count: int) -> None:
        self._count += count
        self._slots.change(count)

    def release(self) -> None:
        """Release the slot of a finished sample."""
        self.add(-1)

    def close(self) -> None:
        """Release the slots that are left when the group is done."""
        if not self._is_closed:
            self._is_closed = True
            self.add(-self._count)
            self._on_close()
