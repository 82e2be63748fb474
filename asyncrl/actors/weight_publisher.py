"""Takes each new version from the backend to wherever engines load it, while the learner goes on training."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from asyncrl.messages import WeightVersion
from asyncrl.protocols import Bus, WeightChannel
from asyncrl.topics import WEIGHTS

if TYPE_CHECKING:
    import torch

    Tensors = list[tuple[str, torch.Tensor]]


class WeightPublisher:
    """One version at a time: the next waits until the one before is announced, so versions are announced in order."""

    def __init__(self, bus: Bus, channel: WeightChannel) -> None:
        self._bus = bus
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._announcing: asyncio.Task[None] | None = None
        self.seconds = 0.0
        """From snapshot to announcement, of the last version announced."""

    def start(self, tensors: Tensors, *, run_epoch: int, policy_version: int, group: asyncio.TaskGroup) -> None:
        """Write, hash and announce a snapshot as a task of ``group``. Call ``wait`` first."""
        store = functools.partial(self._channel.publish, tensors, run_epoch=run_epoch, policy_version=policy_version)
        self._announcing = group.create_task(self._announce(store), name=f"publish-{policy_version}")

    async def wait(self) -> None:
        """Until what was started is announced."""
        if self._announcing is not None:
            await self._announcing

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _announce(self, store: Callable[[], WeightVersion]) -> None:
        started = time.monotonic()
        version = await asyncio.get_running_loop().run_in_executor(self._thread, store)
        await self._bus.put(WEIGHTS, version)
        self.seconds = time.monotonic() - started
