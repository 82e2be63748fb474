"""What samples, and how it takes new weights. Adapters: engines/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.generation import Generation, Partial
from asyncrl.messages import Sampling, WeightVersion
from asyncrl.transfer_messages import TransferOffer, TransferRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """running: sequences being decoded; queued: waiting for a place; tokens_generated: since start.

    is_live  tokens_generated moves with the tokens, not only when an answer is done: when it stands still, so does the
             engine
    """

    running: int = 0
    queued: int = 0
    tokens_generated: int = 0
    is_live: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """pause_seconds: how long no token was decoded; load_seconds: from the order to the new weights sampling."""

    pause_seconds: float
    load_seconds: float


class Engine(Protocol):
    """Samples from a model whose weights may change between any two tokens."""

    async def start(self) -> None: ...

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        """One sampled answer. Many run at once; the engine batches them.

        With ``partial`` the answer begins with its prefix, and can be seen while it grows. An engine that ignores it
        begins anew: that is right too, only nothing is salvaged of what a dead worker had.

        Every token carries the version of the weights that sampled it. Engines that can sample the same tokens for
        the same seed and weights. Raises EngineError (try elsewhere), PromptError (no engine can)
        or EngineDied (this process is over).
        """
        ...

    async def load(self, weights: WeightVersion) -> LoadReport:
        """Switch to newer weights. Generations in progress go on with them from the next token.

        Raises WeightsError when the new ones cannot be read: it keeps the old ones, or, with ``version`` below all
        others, samples nothing until a load succeeds. Whether the checksum is right the caller has seen to
        (WeightChannel.verify).
        """
        ...

    @property
    def version(self) -> tuple[int, int]:
        """(run_epoch, policy_version) of the weights that sample now; below all others when it has no whole weights."""
        ...

    @property
    def receiver(self) -> Receiver | None:
        """Takes weights out of the learner's memory; None when this engine loads folders only."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side of a transfer (Sender is the learner's)."""

    @property
    def request(self) -> TransferRequest:
        """What to ask the learner next: where to meet, or, once joined, for the weights."""
        ...

    async def join(self, offer: TransferOffer) -> None:
        """Meet the learner. Raises WeightsError."""
        ...

    async def receive(self, offer: TransferOffer) -> LoadReport:
        """Take what the learner sends now, as Engine.load takes a folder. Raises WeightsError.

        When it fails half-way the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self) -> None:
        """Forget the learner that was met: the next request asks where to meet."""
        ...
