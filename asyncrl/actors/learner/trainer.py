"""The model in training: its backend, in a thread of its own, and the publication of its weights.

Learner._step -> Trainer.step -> (thread) train: Backend.forward of other models -> Backend.step
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.gpu_turn import GpuTurn, held
from asyncrl.actors.learner.batcher import PreparedBatch
from asyncrl.actors.learner.training_step import train
from asyncrl.actors.learner.weight_publisher import WeightPublisher
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.backends.port import Backend, Offloads, SavesBeside, StepResult
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, StepFailed
from asyncrl.messages.roles import WORKER
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching import packing
from asyncrl.policies.batching.packing import TrainingSequence, pack_for_ranks
from asyncrl.policies.metric import Metric

T = TypeVar("T")
Profile = Callable[[int, Callable[[], StepResult]], StepResult]
"""Runs a step with the given number and may profile it."""


class Trainer:
    """Runs the backend.

    waits         the learner's wait tracker
    restore_from  backend folder of a checkpoint
    profile       wraps each step
    turn          lock on GPUs that engines share in turns
    start_turn    lock on GPUs that engines share, held while the model is loaded
    step_turn     lock held during each step, for which engines on the same GPUs pause
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        backend: Backend,
        algorithm: Algorithm,
        weights: WeightPublisher,
        waits: WaitTracker,
        restore_from: Path | None = None,
        profile: Profile | None = None,
        turn: GpuTurn | None = None,
        start_turn: GpuTurn | None = None,
        step_turn: GpuTurn | None = None,
    ) -> None:
        self.waits = waits
        self._profile = profile
        self._turn = turn
        self._start_turn = start_turn
        self._step_turn = step_turn
        self._is_away = False  # whether the model is off the GPUs
        self._gpu_seconds: dict[str, Metric] = {}
        self._backend = backend
        self._algorithm = algorithm
        self._weights = weights
        self._restore_from = restore_from
        self._run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._export_seconds = 0.0

    async def start(self) -> None:
        await self.take_gpus()
        async with held(self._start_turn):
            await self.call(self._backend.start, what="its backend to start", on="start")
            if self._restore_from is not None:
                restore = functools.partial(self._backend.restore, self._restore_from)
                await self.call(restore, what="its checkpoint to be read", on="start")

    async def step(self, prepared: PreparedBatch, *, step: int) -> StepResult:
        """Train on a batch. ``step``: number of steps done before. Raises StepFailed if nothing has changed."""
        await self.take_gpus()
        backend, batch, mini_batches = self._backend, prepared.batch, prepared.mini_batches
        work = functools.partial(train, self._run, backend, batch, mini_batches, algorithm=self._algorithm, step=step)
        if self._profile is not None:
            work = functools.partial(self._profile, step + 1, work)
        async with held(self._step_turn):
            return await self._call_with_data(work, what="a training step", on="step")

    async def compute_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[NDArray[np.float32]]:
        """Return the policy's logprobs f32[T] of each sequence. Raises StepFailed as ``step`` does."""
        if not sequences:
            return []
        await self.take_gpus()
        return await self._call_with_data(
            functools.partial(self._compute_logprobs, sequences), what="logprobs to be checked"
        )

    def _compute_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[NDArray[np.float32]]:
        learner = self._run.learner
        shards = pack_for_ranks(sequences, ranks=learner.data_parallel, max_tokens=learner.micro_batch_tokens)
        logprobs: dict[int, NDArray[np.float32]] = {}
        for shard, arrays in zip(shards, self._backend.forward(shards), strict=True):
            for micro_batch, array in zip(shard, arrays, strict=True):
                for index, place in zip(micro_batch.sequences, packing.sequence_slices(micro_batch), strict=True):
                    logprobs[int(index)] = array[place]  # fillers have index -1
        return [logprobs[index] for index in range(len(sequences))]

    async def _call_with_data(self, function: Callable[[], T], *, what: str, on: str = "backend") -> T:
        """``call`` a function that bad data may make raise anything: its errors become StepFailed (Backend.step)."""
        try:
            return await self.call(function, what=what, on=on)
        except AsyncRLError:
            raise
        except Exception as error:
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    async def publish_weights(
        self, *, incarnation: int, policy_version: int, num_engines: int, group: asyncio.TaskGroup, is_kept: bool
    ) -> None:
        """Take a snapshot now. Tasks of ``group`` send, write, hash and announce it while the next step runs.

        is_kept: see WeightPublisher.publish
        """
        await self.take_gpus()
        started = time.monotonic()
        self._weights.withdraw()
        snapshot = await self.call(self._backend.export, what="a copy of the weights")
        self._export_seconds = time.monotonic() - started
        await self._weights.publish(
            snapshot,
            incarnation=incarnation,
            policy_version=policy_version,
            num_engines=num_engines,
            group=group,
            is_kept=is_kept,
        )

    async def weights_published(self) -> None:
        """Wait until the newest version is stored and announced."""
        await self._weights.wait()

    async def take_gpus(self) -> None:
        """Wait until engines that share the GPUs have left them, then move the model back."""
        if self._turn is None or self._turn.is_held:
            return
        since = time.monotonic()
        with self.waits.waiting("its turn on the GPUs", on=WORKER):
            await self._turn.acquire()
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
        """Give the GPUs to the engines that share them, once the newest weights are available to them."""
        if self._turn is None or not self._turn.is_held:
            return
        if not self._weights.sends:
            await self.weights_published()
        since = time.monotonic()
        if self._run.run.offload != "engines":
            assert isinstance(self._backend, Offloads)
            await self.call(self._backend.offload, what="the model to leave the GPUs")
            self._is_away = True
        self._turn.release()
        self._gpu_seconds["learner/offload_seconds"] = time.monotonic() - since

    @property
    def saves_beside(self) -> bool:
        """Whether steps continue while the backend writes its part of a checkpoint."""
        return isinstance(self._backend, SavesBeside)

    def begin_save(self, folder: Path) -> None:
        """Begin to write the backend's part of a checkpoint, or write all of it. Blocks; use with ``call``."""
        if isinstance(self._backend, SavesBeside):
            self._backend.begin_save(folder)
        else:
            self._backend.save(folder)

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        """See SavesBeside. Blocks; use with ``call``."""
        if isinstance(self._backend, SavesBeside):
            return self._backend.finish_save(folder, wait=wait)
        return {}

    async def call(self, function: Callable[[], T], *, what: str, on: str = "backend") -> T:
        """Run a blocking function in the backend's thread and report the wait for ``what``."""
        with self.waits.waiting(what, on=on):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Run a blocking function in the backend's thread when it is free. This is not reported as a wait, because the
        step before it may take any time."""
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
