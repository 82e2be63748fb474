"""Takes each new version from the backend to wherever engines load it, while the learner goes on training."""

from __future__ import annotations

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncrl.actors.waits import Waits
from asyncrl.messages import WeightVersion
from asyncrl.policies.faults import FIRST_SECONDS
from asyncrl.protocols import Bus, WeightChannel
from asyncrl.topics import SENT, WEIGHTS

if TYPE_CHECKING:
    from asyncrl.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    snapshot: Snapshot
    run_epoch: int
    policy_version: int
    since: float


class WeightPublisher:
    """The newest version wins: one that is being written is finished, those that came meanwhile but the last are not.

    What the channel sends from memory is announced at once, what it writes when it is written: both always in order.
    """

    def __init__(self, bus: Bus, channel: WeightChannel, *, waits: Waits | None = None, fork: int = 0) -> None:
        """waits: of the learner, which says what it waits for; fork: policy version that it started from"""
        self._fork = fork
        self._waits = waits or Waits()
        self._bus = bus
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._next: _Version | None = None
        self._writing: asyncio.Task[None] | None = None
        self.num_engines = 0
        """Workers known to the learner; goes out with every announcement."""
        self.seconds = 0.0
        """From snapshot to announcement of the folder, of the last version written."""
        self.num_bytes = 0
        """Stored for it."""

    @property
    def sends(self) -> bool:
        """Whether engines can have weights out of memory."""
        return self._channel.sender is not None

    async def publish(
        self, snapshot: Snapshot, *, run_epoch: int, policy_version: int, group: asyncio.TaskGroup
    ) -> None:
        """Announce a snapshot; writing, hashing and announcing its folder go on as a task of ``group``."""
        self._next = _Version(
            snapshot=snapshot, run_epoch=run_epoch, policy_version=policy_version, since=time.monotonic()
        )
        if self._channel.sender is not None:
            self._channel.sender.hold(snapshot, run_epoch=run_epoch, policy_version=policy_version)
            await self._announce(WeightVersion(run_epoch=run_epoch, policy_version=policy_version), key=SENT)
        if self._writing is None or self._writing.done():
            self._writing = group.create_task(self._write(), name="publish-weights")

    async def wait(self) -> None:
        """Until the newest version is announced."""
        if self._writing is not None:
            await self._writing

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _announce(self, version: WeightVersion, *, key: str = "") -> None:
        await self._bus.put(WEIGHTS, replace(version, num_engines=self.num_engines, fork=self._fork), key=key)

    def _progress(self) -> int:
        return self._channel.progress

    async def _write(self) -> None:
        while (taken := self._next) is not None:
            self._next = None
            store = functools.partial(
                self._channel.publish,
                taken.snapshot,
                run_epoch=taken.run_epoch,
                policy_version=taken.policy_version,
            )
            note = f"of version {taken.policy_version}"
            with self._waits.waiting(
                "weights to be written", on="disk", note=note, first=FIRST_SECONDS, progress=self._progress
            ):
                version = await asyncio.get_running_loop().run_in_executor(self._thread, store)
            await self._announce(version)
            self.num_bytes = self._channel.published_bytes
            self.seconds = time.monotonic() - taken.since
