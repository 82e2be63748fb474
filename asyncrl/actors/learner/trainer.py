"""The model in training: its backend, in a thread of its own, and the weights that go out from it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from asyncrl.actors.gpu_turn import GpuTurn
from asyncrl.actors.learner.batcher import Prepared
from asyncrl.actors.learner.training_step import TrainingStep
from asyncrl.actors.learner.weight_publisher import WeightPublisher
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, StepFailed
from asyncrl.policies.batching.batch import Metric
from asyncrl.policies.health.faults import FIRST_SECONDS, WORKER
from asyncrl.policies.learning_rate import Schedule
from asyncrl.protocols import Backend, Offloads, Rehearsing, SavesBeside, StepResult

T = TypeVar("T")
Profile = Callable[[int, Callable[[], StepResult]], StepResult]
"""Does a step, of which the number is given, and may profile it."""


def is_of_data(error: Exception) -> bool:
    """Whether what a step raised may be a matter of its groups (Backend.step)."""
    return isinstance(error, StepFailed) or not isinstance(error, AsyncRLError)


def schedule_of(run: RunConfig) -> Schedule:
    """The policy's learning rate: without decay_steps it falls until the run's last step."""
    learner = run.learner
    return Schedule(
        kind=learner.schedule,
        peak=learner.learning_rate,
        floor=learner.min_learning_rate,
        warmup_steps=learner.warmup_steps,
        steps=learner.decay_steps or run.run.steps - (run.critic.warmup_steps if run.critic else 0),
    )


class Trainer:
    """waits: of the learner, which says what it waits for; restore_from: a checkpoint's backend folder;
    profile: around each step; turn: on GPUs that engines have too."""

    def __init__(
        self,
        run: RunConfig,
        *,
        backend: Backend,
        training: TrainingStep,
        weights: WeightPublisher,
        waits: WaitTracker,
        restore_from: Path | None = None,
        profile: Profile | None = None,
        turn: GpuTurn | None = None,
    ) -> None:
        self.waits = waits
        self._profile = profile
        self._turn = turn
        self._is_away = False  # from the GPUs
        self._gpu_seconds: dict[str, Metric] = {}
        self._backend = backend
        self._training = training
        self._weights = weights
        self._restore_from = restore_from
        self._schedule = schedule_of(run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._export_seconds = 0.0

    async def start(self) -> None:
        await self.take_gpus()
        await self.call(self._backend.start, what="its backend to start", on="start")
        if self._restore_from is not None:
            restore = functools.partial(self._backend.restore, self._restore_from)
            await self.call(restore, what="its checkpoint to be read", on="start")

    async def step(self, prepared: Prepared, *, step: int) -> StepResult:
        """Train on a batch. ``step``: how many steps were done before."""
        await self.take_gpus()
        rate = self._training.learning_rate(step, schedule=self._schedule)
        train = functools.partial(self._training, prepared.batch, prepared.parts, step=step, learning_rate=rate)
        if self._profile is not None:
            train = functools.partial(self._profile, step + 1, train)
        return await self.call(train, what="a training step", on="step")

    @property
    def can_rehearse(self) -> bool:
        """Whether a rehearsal is all of a step but its update, and not the scores alone."""
        return isinstance(self._backend, Rehearsing)

    async def rehearse(self, prepare: Callable[[], Prepared], *, step: int) -> str:
        """Why a step on what ``prepare`` makes cannot be done, with nothing changed; "" when it can.

        Raises what ends the learner whatever the batch: a backend that is gone.
        """

        def rehearse() -> str:
            try:
                prepared = prepare()
                return self._training.rehearse(prepared.batch, prepared.parts, step=step)
            except Exception as error:  # whatever the data does to a step
                if not is_of_data(error):
                    raise
                return str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"

        await self.take_gpus()
        return await self.call(rehearse, what="a step that failed to be tried with fewer groups", on="step")

    async def rescore(self, judge: Callable[[Backend], T]) -> T:
        """What ``judge`` finds when it scores answers with the backend, between two steps."""
        await self.take_gpus()
        return await self.call(functools.partial(judge, self._backend), what="answers to be scored again")

    @property
    def must_publish_at_start(self) -> bool:
        """Whether engines get their weights from memory, so that they need this learner for version 0 as well."""
        return self._weights.sends

    async def publish_weights(
        self, *, incarnation: int, policy_version: int, num_engines: int, group: asyncio.TaskGroup
    ) -> None:
        """Snapshot now; send, write, hash and announce as tasks of ``group``, while the next step runs."""
        await self.take_gpus()
        started = time.monotonic()
        snapshot = await self.call(self._backend.export, what="a copy of the weights")
        self._export_seconds = time.monotonic() - started
        await self._weights.publish(
            snapshot, incarnation=incarnation, policy_version=policy_version, num_engines=num_engines, group=group
        )

    async def restore_weights(self) -> None:
        """Store and announce again what is missing of the newest version."""
        await self._weights.restore()

    async def weights_published(self) -> None:
        """Wait until the newest version is announced."""
        await self._weights.wait()

    async def take_gpus(self) -> None:
        """Wait until engines that share the GPUs have left them, and bring the model back."""
        if self._turn is None or self._turn.is_ours:
            return
        since = time.monotonic()
        with self.waits.waiting("its turn on the GPUs", on=WORKER):
            await self._turn.take()
        taken = time.monotonic()
        if self._is_away:
            assert isinstance(self._backend, Offloads)
            await self.call(self._backend.onload, what="the model to come back to the GPUs")
            self._is_away = False
        self._gpu_seconds |= {
            "learner/gpus_wait_seconds": taken - since,
            "learner/onload_seconds": time.monotonic() - taken,
        }

    async def leave_gpus(self) -> None:
        """Leave the GPUs to the engines that share them, once these can have the newest weights."""
        if self._turn is None or not self._turn.is_ours:
            return
        await self.weights_published()
        since = time.monotonic()
        assert isinstance(self._backend, Offloads)
        await self.call(self._backend.offload, what="the model to leave the GPUs")
        self._is_away = True
        self._turn.give()
        self._gpu_seconds["learner/offload_seconds"] = time.monotonic() - since

    @property
    def saves_beside(self) -> bool:
        """Whether steps go on while the backend writes its part of a checkpoint."""
        return isinstance(self._backend, SavesBeside)

    def begin_save(self, folder: Path) -> None:
        """Begin to write the backend's part of a checkpoint, or write it. Blocks; for ``call``."""
        if isinstance(self._backend, SavesBeside):
            self._backend.begin_save(folder)
        else:
            self._backend.save(folder)

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        """See SavesBeside. Blocks; for ``call``."""
        if isinstance(self._backend, SavesBeside):
            return self._backend.finish_save(folder, wait=wait)
        return {}

    async def call(self, function: Callable[[], T], *, what: str, on: str = "backend") -> T:
        """Run a blocking function in the backend's thread, and say meanwhile that ``what`` is waited for."""
        with self.waits.waiting(what, on=on, note="", first=FIRST_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Run a blocking function in the backend's thread when that is free: nobody waits for it, however long a step
        is before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def metrics(self) -> dict[str, Metric]:
        return {
            "weights/publish_seconds": self._weights.seconds,
            "weights/publish_bytes": float(self._weights.num_bytes),
            "learner/export_seconds": self._export_seconds,
            **self._gpu_seconds,
        }

    async def stop(self) -> None:
        await self.call(self._backend.close, what="its backend to close")

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        self._weights.close()
