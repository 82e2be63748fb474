"""The port of sampling engines and of their weight updates. Adapters: engines/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.messages.weight_transfer import BucketLayout
from asyncrl.protocols.generation import Generation, PartialGeneration

if TYPE_CHECKING:
    import torch

Source: TypeAlias = "Callable[[bytes, torch.device], Iterator[tuple[str, torch.Tensor]]]"
"""Yields a model's tensors received from the learner: see Intake.take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's current load.

    running           sequences being decoded
    queued            sequences that wait for a slot
    tokens_generated  tokens since start
    is_live           tokens_generated rises with every token, not only with complete answers; if it stalls, the engine
                      has stalled
    is_away           the engine's memory is off the GPUs, which another process uses; running and queued wait for them
    """

    running: int = 0
    queued: int = 0
    tokens_generated: int = 0
    is_live: bool = False
    is_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """pause_seconds: time without decoding; load_seconds: time from the request until the new weights sample."""

    pause_seconds: float
    load_seconds: float


class Engine(Protocol):
    """Samples from a model whose weights may change between two tokens."""

    async def start(self) -> None: ...

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        """Sample one answer. Many calls run concurrently; the engine batches them.

        With ``partial``, the answer starts with its prefix and can be observed as it grows. An engine may ignore it and
        start over: the result is correct, but the tokens sampled by a dead worker are lost.

        Every token carries the version of the weights that sampled it. Engines that support it sample the same tokens
        for the same seed and weights. Raises EngineError (another engine may succeed), PromptError (no engine can
        answer) or EngineDied (this engine is unusable).
        """
        ...

    async def load(self, weights: WeightVersion) -> LoadReport:
        """Switch to newer weights. Generations in progress continue with them from the next token.

        Raises WeightsError if the new weights cannot be read. The engine then keeps the old weights; or ``version`` is
        below all others and the engine samples nothing until a load succeeds. The caller has verified the checksum
        (WeightChannel.verify).
        """
        ...

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the current weights; below all others if the weights are incomplete."""
        ...

    @property
    def intake(self) -> Intake | None:
        """Receives weights from another process's memory, after start; None if this engine only loads folders."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@runtime_checkable
class SharesGpus(Protocol):
    """An engine that can move its memory off the GPUs (run.colocated)."""

    async def release(self) -> None:
        """Free the GPUs; call it when nothing runs. Weights stay on the host; cached keys and values are dropped."""
        ...

    async def resume(self) -> None:
        """Return to the GPUs with the same weights. Raises EngineDied."""
        ...


class Intake(Protocol):
    """Moves weights from another process's memory into an engine. A weight channel's Receiver directs it."""

    @property
    def num_ranks(self) -> int:
        """Number of engine processes that hold the model."""
        ...

    async def take(self, version: tuple[int, int], source: Source, payload: bytes) -> LoadReport:
        """Switch to the tensors that ``source`` yields, like Engine.load with a folder.

        ``source(payload, device)`` is called in each process of the engine, so it must be a top-level function of a
        module that they can import. It yields (name, tensor) for every tensor of the model, each complete and on
        ``device``. The engine owns the tensors from then on: ``source`` must not reuse their memory. Raises
        WeightsError, or EngineDied: in a server, an error in ``source`` may leave torn weights.
        """
        ...

    @property
    def collectives(self) -> Collectives | None:
        """Joins broadcasts of the learner; None if the engine does not support broadcasts."""
        ...


class Collectives(Protocol):
    """An engine's processes as ranks 1 and up of torch.distributed groups, with a rank of the learner as rank 0."""

    @property
    def buckets_at_once(self) -> int:
        """Number of buckets of NCCL groups that the engine has in memory at a time. The learner makes them smaller."""
        ...

    async def join(self, group: str, *, host: str, port: int, kind: str) -> None:
        """Join the learner, which listens at host:port, in a group of ``kind`` nccl or gloo. Raises WeightsError."""
        ...

    async def receive(
        self, version: tuple[int, int], parts: Sequence[tuple[str, Sequence[BucketLayout]]]
    ) -> LoadReport:
        """Receive the buckets that the learner broadcasts now: each group's own buckets, one group after the other.

        All buckets belong to one version; the engine switches when it has the last one. Raises WeightsError.

        If it fails half-way, the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self, group: str) -> None: ...
