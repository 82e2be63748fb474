"""The port of training backends. Adapters are in backends/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from asyncrl.policies.batching.packing import MicroBatch
    from asyncrl.tensors.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """metrics: named as in asyncrl/metrics/schema.py, reduced over micro-batches and data-parallel ranks.

    tokens: of the policy, for each document that is MicroBatch.recorded, f32[2, M]: logprobs and entropies in nats of
    the M tokens that the step trained, as it found them. A backend may leave documents out
    """

    metrics: Mapping[str, float]
    tokens: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)


class Backend(Protocol):
    """Holds the policy and the models that the algorithm needs besides it, by name: a trained "critic", a frozen
    "reference" or "teacher".

    Every method blocks; the learner calls them from the backend's own thread. With several ranks only rank 0 has a
    Backend, which leads the others through its own collectives. ``dp_shards[r]`` is for data-parallel rank r.
    """

    def start(self) -> None:
        """Load the models and make the optimizers."""
        ...

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        """One optimizer step of a trained model on one batch; gradients are summed over the shards.

        What it raises, except BackendError, it raises before weights or optimizer change, and it can be called again:
        the learner then looks for the groups of the batch that it fails with. A backend that cannot promise that raises
        BackendError; one whose ranks agreed that it failed raises StepFailed.

        Returns the objective's metrics; for the critic, also critic/grad_norm, critic/learning_rate and
        critic/skipped_steps.
        And what it thought of the tokens of documents that are recorded (StepResult).
        """
        ...

    def score(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """A model's output for every token, without gradient: f32[N] per micro-batch, nested as ``dp_shards``.

        policy, reference, teacher: logprobs at the sampling temperature, 0 at document starts.
        critic: the value after each token. The state in which token n was chosen has value values[n - 1]; a truncated
        answer is bootstrapped from the value at its last token.
        """
        ...

    def export(self) -> Snapshot:
        """The policy's weights under their Hugging Face names, in the dtype of its folder, on the training device.

        Of several ranks each may keep a part (Snapshot.others): no rank needs to hold the whole model.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG state of the trained models: what a run needs beside LearnerState to resume.

        Frozen models are loaded from their own folders.
        """
        ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Rehearsing(Protocol):
    """A backend that can try a step without taking it. Of one that cannot, the learner asks for scores instead."""

    def rehearse(self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy") -> StepResult:
        """All of ``step`` but the update: its metrics, or what it raises."""
        ...


@runtime_checkable
class Offloads(Protocol):
    """A backend whose memory can leave the GPUs to others, between two calls (run.colocated)."""

    def offload(self) -> None:
        """Move models and optimizers to the host; nothing else may be called before ``onload`` but ``finish_save`` and
        ``close``."""
        ...

    def onload(self) -> None:
        """Move them back, as they were to the last bit."""
        ...


@runtime_checkable
class SavesBeside(Protocol):
    """A backend that can write a checkpoint while it trains on. Of one that cannot, the learner waits for ``save``."""

    def begin_save(self, folder: Path) -> None:
        """Copy what ``save`` writes, and begin to write it. What was begun before and is not finished is given up."""
        ...

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        """Complete what ``begin_save`` began, once it is written: SHA-256 of files that nobody needs to hash again.

        None while it is being written; never with ``wait``. Raises CheckpointError when it could not be written: then
        begin again.
        """
        ...
