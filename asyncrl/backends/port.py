"""The port of training backends. Adapters: backends/."""

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
    """Result of one step.

    metrics  named as in asyncrl/metrics/schema.py, reduced over micro-batches and data-parallel ranks
    tokens   for each sequence in MicroBatch.recorded, f32[2, M]: the policy's logprobs and entropies (nats) of the M
             trained tokens, as they were at the start of the step. A backend may leave sequences out
    """

    metrics: Mapping[str, float]
    tokens: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)


class Backend(Protocol):
    """Holds the policy and other models that the algorithm needs, by name: a trained "critic", a frozen "reference" or
    "teacher".

    Every method blocks; the learner calls them from the backend's own thread. With several ranks, only rank 0 has a
    Backend, which leads the other ranks through its own collectives. ``dp_shards[r]`` is for data-parallel rank r.
    """

    def start(self) -> None:
        """Load the models and create the optimizers."""
        ...

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        """Take one optimizer step of a trained model on one batch; gradients are summed over the shards.

        Any exception except BackendError is raised before weights or optimizer change: the learner fails the groups of
        the batch and goes on with the next. A backend that cannot guarantee this raises BackendError, as one of several
        ranks does: they end together.

        Returns the objective's metrics and the logprobs and entropies of recorded sequences (StepResult). For the
        critic, the metrics include critic/grad_norm, critic/learning_rate and critic/skipped_steps.
        """
        ...

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """Return a model's output for every token, without gradient: f32[N] per micro-batch, nested as ``dp_shards``.

        policy, reference, teacher: logprobs at the sampling temperature, 0 at sequence starts.
        critic: the value after each token. Token n was chosen in the state whose value is values[n - 1]. A truncated
        answer is bootstrapped from the value at its last token.
        """
        ...

    def export(self) -> Snapshot:
        """Return the policy's weights with Hugging Face names, in the run's dtype, on the training device.

        With several ranks, each rank may keep a part (Snapshot.others): no rank needs to hold the whole model.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG state of the trained models: all that a resume needs besides LearnerState.

        Frozen models are loaded from their own folders.
        """
        ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Offloads(Protocol):
    """A backend that can free its GPU memory between two calls (run.colocated)."""

    def offload(self) -> None:
        """Move models and optimizers to the host. Only ``finish_save`` and ``close`` may be called until ``onload``."""
        ...

    def onload(self) -> None:
        """Move models and optimizers back to the GPUs, bit for bit."""
        ...


@runtime_checkable
class KeepsToShare(Protocol):
    """A backend that can leave a part of its GPUs' memory to others."""

    def limit_memory(self, num_bytes: int) -> None:
        """Keep at most ``num_bytes`` of each GPU, besides CUDA contexts and NCCL's buffers. Call it before start."""
        ...


@runtime_checkable
class ResetsOptimizer(Protocol):
    """A backend that can start its optimizers anew (learner.reset_optimizer)."""

    def reset_optimizer(self) -> None:
        """Forget the moments and step counts of all trained models. The next step starts from moments of zero."""
        ...


@runtime_checkable
class RefreshesReference(Protocol):
    """A backend whose reference can become the policy (reference.refresh_steps)."""

    def refresh_reference(self) -> None:
        """Copy the policy's weights, adapters merged, to the "reference", which checkpoints hold then."""
        ...


@runtime_checkable
class RecordsRouting(Protocol):
    """A backend that can replay its own choice of experts (learner.options.replay_own_routing)."""

    @property
    def records_routing(self) -> bool: ...

    def forward_recorded(self, dp_shards: Sequence[Sequence[MicroBatch]]) -> list[list[NDArray[np.float32]]]:
        """Return the policy's ``forward`` and remember to which experts it routed each token.

        Until the next call, ``step`` routes the tokens of these micro-batches to the same experts.
        """
        ...


@runtime_checkable
class SavesBeside(Protocol):
    """A backend that can write a checkpoint while it trains. For other backends, the learner waits for ``save``."""

    def begin_save(self, folder: Path) -> None:
        """Begin to write what ``save`` would write now. An earlier unfinished save is abandoned."""
        ...

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        """Complete the save that ``begin_save`` began once it is written. Return SHA-256 sums of files already hashed.

        Returns None while the save is still being written; never with ``wait``. Raises CheckpointError if it could not
        be written; begin again then.
        """
        ...
