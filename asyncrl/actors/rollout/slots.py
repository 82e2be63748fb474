"""The sample slots of a worker: how many samples a stage has in progress, and who has the whole worker for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class SampleSlots:
    """Counted in samples, not groups: most of a group is done long before its longest sample, and the slots that it
    frees are taken at once.

    A group may take the worker for itself (``take_alone``). From then until it is done no other group gets slots, of
    whatever stage.
    """

    def __init__(self, max_running: int, *, max_ungraded: int = 2**31, beside: SampleSlots | None = None) -> None:
        """
        max_ungraded  while so many groups wait for their rewards, no slot is free
        beside        those of another stage of the same worker; each counts its own samples
        """
        self.max_running = max_running
        self._running = 0
        self._max_ungraded, self._num_ungraded = max_ungraded, 0
        self._worker: _Worker = _Worker() if beside is None else beside._worker

    @property
    def has_free(self) -> bool:
        """A group may take slots. It may take more than are free: all but one of its own samples are over soon."""
        return self.num_free > 0 and not self.is_reserved

    @property
    def num_free(self) -> int:
        return max(0, self.max_running - self._running) if self._num_ungraded < self._max_ungraded else 0

    @property
    def num_running_beside(self) -> int:
        """Samples in progress of the worker's other stages."""
        return self._worker.num_running - self._running

    @property
    def is_reserved(self) -> bool:
        """A group has the worker for itself, or waits until it has."""
        return self._worker.num_reservations > 0

    async def unreserved(self) -> None:
        """Returns once no group has the worker for itself, or waits for it."""
        while self.is_reserved:
            await self._worker.until_changed()

    async def take(self, count: int) -> SlotLease:
        """Slots for ``count`` samples, once one is free."""
        while not self.has_free:
            await self._worker.until_changed()
        return self._leased(count)

    async def take_alone(self, count: int) -> SlotLease:
        """Slots for ``count`` samples, once no other sample is in progress; nothing else begins before it is done."""
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
    def grading(self) -> Iterator[None]:
        """Inside, a group of which everything is generated waits for its rewards. It holds no slot."""
        self._num_ungraded += 1
        self._worker.run(0)
        try:
            yield
        finally:
            self._num_ungraded -= 1
            self._worker.run(0)

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Inside, ``on_change`` is called after every change, of other stages too."""
        self._worker.listeners.append(on_change)
        try:
            yield
        finally:
            self._worker.listeners.remove(on_change)

    def change(self, count: int) -> None:
        """The lease's: that many more samples are in progress, or fewer."""
        self._running += count
        self._worker.run(count)

    def _leased(self, count: int) -> SlotLease:
        lease = SlotLease(self)
        lease.add(count)
        return lease

    def _leave_alone(self) -> None:
        self._worker.alone.release()
        self._worker.reserve(-1)


class _Worker:
    """What the slots of all stages have in common."""

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
