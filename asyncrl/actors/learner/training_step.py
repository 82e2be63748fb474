"""What one step of the learner is when an algorithm needs more models than the policy.

    score (critic, reference, teacher, policy) -> advantages and returns -> step the policy -> step the critic

Blocking: the learner calls it in the backend's thread. Batches are packed ahead; only what depends on the present
weights happens here. An algorithm that needs no other model gets ``backend.step`` and nothing else. For the first
``critic_warmup_steps`` steps the critic learns alone: each makes a policy version all the same, with the weights of the
one before, so step n always makes version n.

Tests: tests/actors/learner/test_training_step.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import SCORED_BY, Algorithm
from asyncrl.policies.batching.apply_scores import complete
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.protocols import Backend, Rehearsing, StepResult

log = logging.getLogger("asyncrl.learner")


class TrainingStep:
    """Holds nothing that changes: which steps are warm-up follows from the step's number, so a resumed run goes on."""

    def __init__(
        self,
        backend: Backend,
        *,
        algorithm: Algorithm,
        critic_learning_rate: float = 0.0,
        critic_warmup_steps: int = 0,
    ) -> None:
        self._backend = backend
        self._algorithm = algorithm
        self._critic_learning_rate = critic_learning_rate
        self._critic_warmup_steps = critic_warmup_steps

    def policy_steps(self, steps: int) -> int:
        """How many of the first ``steps`` steps trained the policy."""
        return max(0, steps - self._critic_warmup_steps)

    def learning_rate(self, step: int, *, peak: float, warmup_steps: int) -> float:
        """Of the step after ``step`` steps: linear to ``peak`` over the first ``warmup_steps`` of the policy."""
        return peak * min(1.0, self.policy_steps(step + 1) / max(warmup_steps, 1))

    def rehearse(self, batch: Batch, dp_shards: Sequence[Sequence[MicroBatch]], *, step: int) -> str:
        """All of a step but its updates: why it cannot be done, "" when it can. Raises what the step would raise.

        A backend that cannot rehearse is asked for the policy's scores of the same tokens.
        """
        names = self._algorithm.advantage_scores | self._algorithm.loss_scores
        if names or self._algorithm.batch_scores:
            scores = {name: self._backend.score(dp_shards, model=SCORED_BY[name]) for name in sorted(names)}
            dp_shards = complete(dp_shards, scores, batch=batch, algorithm=self._algorithm)
        models = [name for name in ("critic",) if name in self._algorithm.models]
        if self.policy_steps(step + 1):
            models = ["policy", *models]
        for model in models:
            if not isinstance(self._backend, Rehearsing):
                self._backend.score(dp_shards, model=model)
            elif is_skipped(self._backend.rehearse(dp_shards, model=model).metrics, model=model):
                return "its loss or its gradient is not finite"
        return ""

    def __call__(
        self, batch: Batch, dp_shards: Sequence[Sequence[MicroBatch]], *, step: int, learning_rate: float
    ) -> StepResult:
        """Train on ``batch``, packed as ``dp_shards``; ``step``: how many steps were done before."""
        if not batch.num_tokens:
            log.warning("step %d trains nothing: no answer of its batch has a token that is trained", step + 1)
        names = self._algorithm.advantage_scores | self._algorithm.loss_scores
        if not (names or self._algorithm.batch_scores):
            return self._backend.step(dp_shards, learning_rate=learning_rate)
        started = time.monotonic()
        scores = {name: self._backend.score(dp_shards, model=SCORED_BY[name]) for name in sorted(names)}
        dp_shards = complete(dp_shards, scores, batch=batch, algorithm=self._algorithm)
        metrics = {"learner/score_seconds": time.monotonic() - started}
        if self.policy_steps(step + 1):
            metrics |= self._backend.step(dp_shards, learning_rate=learning_rate).metrics
        else:
            metrics["learner/learning_rate"] = 0.0
        if "critic" in self._algorithm.models and not is_skipped(metrics):  # else the batch may be trained again
            metrics |= self._critic_step(dp_shards).metrics
        return StepResult(metrics=metrics)

    def _critic_step(self, dp_shards: Sequence[Sequence[MicroBatch]]) -> StepResult:
        """The policy's step is done: it cannot be repeated without the groups that this one fails with."""
        try:
            return self._backend.step(dp_shards, learning_rate=self._critic_learning_rate, model="critic")
        except Exception as error:
            raise BackendError(f"the critic's step failed: {type(error).__name__}: {error}") from error


def is_skipped(metrics: Mapping[str, float], *, model: str = "policy") -> bool:
    """Whether a step changed no weights because its loss or its gradient was not finite."""
    learner = "learner" if model == "policy" else model
    return bool(metrics.get(f"{learner}/skipped_steps", 0.0))
