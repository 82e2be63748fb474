"""A learner's checkpoints: one a step at most, and the log is trimmed behind what is on disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from asyncrl import checkpoint
from asyncrl.actors.base import Actor
from asyncrl.checkpoint import LearnerState
from asyncrl.errors import BusError
from asyncrl.policies.batch import Metric
from asyncrl.topics import TRAJECTORIES


class InBackend(Protocol):
    """Calls a function in the backend's thread, and says meanwhile ``what`` is waited for, ``on`` which part."""

    def __call__(self, function: Callable[[], Path], *, what: str, on: str = "backend") -> Awaitable[Path]: ...


class Checkpoints:
    """keep: so many, the newest;  keep_log: it is not trimmed;  owner: the learner"""

    def __init__(self, owner: Actor, *, directory: Path, keep: int, keep_log: bool, in_backend: InBackend) -> None:
        self._bus, self._log, self._in_backend = owner.bus, owner.log, in_backend
        self._directory, self._keep, self._keep_log = directory, keep, keep_log
        self._step = -1  # of this life's last checkpoint
        self._seconds: float | None = None  # of the one written since metrics were last taken

    def has(self, step: int) -> bool:
        """Whether this step has its own: what arrived since is read from the log again."""
        return step == self._step

    async def write(self, state: LearnerState, *, save_backend: Callable[[Path], None], trims: bool) -> None:
        """trims: what the checkpoint has consumed may leave the log. Raises CheckpointError."""
        started = time.monotonic()
        write = functools.partial(checkpoint.write, self._directory, state, save_backend=save_backend, keep=self._keep)
        folder = await self._in_backend(write, what="a checkpoint to be written", on="disk")
        self._step = state.step
        self._log.info("checkpoint %s", folder)
        if trims and not self._keep_log:
            await self._trim(through=state.consumed["watermark"] - 1)
        self._seconds = time.monotonic() - started

    def take_metrics(self) -> dict[str, Metric]:
        """Since this was last asked."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"learner/checkpoint_seconds": seconds}

    async def _trim(self, *, through: int) -> None:
        """What a full disk keeps us from forgetting now is forgotten behind the next checkpoint."""
        try:
            await self._bus.trim(TRAJECTORIES, through=through)
        except BusError as error:
            self._log.warning("the log is not trimmed: %s", error)
