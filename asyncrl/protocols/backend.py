"""What trains. Adapters: backends/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from asyncrl.policies.packing import MicroBatch
    from asyncrl.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """metrics: named as in design section 6, already reduced over micro-batches and data-parallel ranks."""

    metrics: Mapping[str, float]


class Backend(Protocol):
    """Holds the policy and, by name, the models an algorithm needs beside it (backends.models.AuxiliaryModel): a
    trained "critic", a frozen "reference" or "teacher".

    Every method blocks: the learner calls them from the backend's own thread. With several data-parallel ranks only
    rank 0 has a Backend; it leads the others through its own collectives. ``shares[r]`` is what data-parallel rank r
    works on.
    """

    def start(self) -> None:
        """Load the models and make the optimizers."""
        ...

    def step(
        self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        """One optimizer step of a trained model on one batch; gradients are summed over the shares.

        Metrics are the objective's, and of the critic critic/grad_norm, critic/learning_rate, critic/skipped_steps.
        """
        ...

    def score(
        self, shares: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """What a model says of every token, without gradient: f32[N] per micro-batch, shaped as ``shares``.

        Of policy, reference and teacher the logprobs at the sampling temperature, 0 at document starts. Of the critic
        the value after each token: the state in which token n was chosen is worth values[n - 1], and what a truncated
        answer might still have earned is the value at its last token.
        """
        ...

    def export(self) -> Snapshot:
        """The policy's weights under their Hugging Face names and in its folder's type, where they are trained."""
        ...

    def save(self, folder: Path) -> None:
        """Everything a resumed run needs besides what the learner itself knows: weights, optimizers, RNG.

        Of the trained models; frozen ones are loaded from their own folders again.
        """
        ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None: ...
