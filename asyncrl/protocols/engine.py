"""The port of sampling engines, and how they get new weights. Adapters: engines/."""

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
"""Gets a model's tensors from the learner: see Intake.take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """running: sequences being decoded; queued: waiting for a slot; tokens_generated: since start.

    is_away  its memory is not on the GPUs, which others have now; running and queued wait for them
    is_live  tokens_generated rises with every token, not only when an answer is complete, so if it stalls, so does the
             engine
    """

    running: int = 0
    queued: int = 0
    tokens_generated: int = 0
    is_live: bool = False
    is_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """pause_seconds: time without decoding; load_seconds: from the request until the new weights sample."""

    pause_seconds: float
    load_seconds: float


class Engine(Protocol):
    """Samples from a model whose weights may change between any two tokens."""

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
        start over, which is correct but loses the tokens that a dead worker had sampled.

        Every token carries the version of the weights that sampled it. Engines that can, sample the same tokens for the
        same seed and weights. Raises EngineError (try another engine), PromptError (no engine can do it) or EngineDied
        (this engine cannot be used any more).
        """
        ...

    async def load(self, weights: WeightVersion) -> LoadReport:
        """Switch to newer weights. Generations in progress continue with them from the next token.

        Raises WeightsError if the new weights cannot be read: the engine keeps the old ones or, with ``version`` below
        all others, samples nothing until a load succeeds. The caller has verified the checksum (WeightChannel.verify).
        """
        ...

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the current weights; below all others when they are incomplete."""
        ...

    @property
    def intake(self) -> Intake | None:
        """Receives weights from another process's memory, once started; None if this engine only loads folders."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@runtime_checkable
class SharesGpus(Protocol):
    """An engine whose memory can leave its GPUs to others (run.colocated)."""

    async def release(self) -> None:
        """Leave the GPUs; call it when nothing runs. Weights are kept on the host, cached keys and values are not."""
        ...

    async def resume(self) -> None:
        """Come back, with the same weights. Raises EngineDied."""
        ...


class Intake(Protocol):
    """How weights get into an engine out of another process's memory. A weight channel's Receiver orders it."""

    @property
    def num_ranks(self) -> int:
        """Processes of the engine that hold the model."""
        ...

    async def take(self, version: tuple[int, int], source: Source, payload: bytes) -> LoadReport:
        """Switch to the tensors that ``source`` yields, as Engine.load does to those of a folder.

        ``source(payload, device)`` is called in each of the engine's processes: a function at the top of a module that
        they can import. It yields (name, tensor) of every tensor of the model, each whole, on ``device``, and the
        engine's from then on: its memory is not used again. Raises WeightsError, or EngineDied: in a server, what
        ``source`` raises may leave torn weights.
        """
        ...

    @property
    def collectives(self) -> Collectives | None:
        """None when the engine takes no broadcasts."""
        ...


class Collectives(Protocol):
    """An engine's processes as ranks 1 and up of torch.distributed groups, of which a rank of the learner is rank 0."""

    async def join(self, group: str, *, host: str, port: int, kind: str) -> None:
        """Meet the learner, who listens there, in a group of ``kind`` nccl or gloo. Raises WeightsError."""
        ...

    async def receive(
        self, version: tuple[int, int], parts: Sequence[tuple[str, Sequence[BucketLayout]]]
    ) -> LoadReport:
        """Take the buckets that the learner broadcasts now: of each group its own, one group after the other.

        All of them are one version: the engine switches when it has the last. Raises WeightsError.

        If it fails half-way, the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self, group: str) -> None: ...
