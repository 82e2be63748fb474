"""What one step of the learner is when an algorithm needs more models than the policy.

    score (critic, reference, teacher, policy) -> advantages and returns -> step the policy -> step the critic

Blocking: the learner calls it in the backend's thread. Batches are packed ahead; only what depends on the present
weights happens here. An algorithm that needs no other model gets ``backend.step`` and nothing else. For the first
``critic_warmup_steps`` steps the critic learns alone: each makes a policy version all the same, with the weights of the
one before, so step n always makes version n.

Tests: tests/test_training_step.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.batch import Batch
from asyncrl.policies.catalogue import SCORED_BY
from asyncrl.policies.packing import MicroBatch
from asyncrl.policies.scored import complete
from asyncrl.protocols import Backend, StepResult

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

    def __call__(
        self, batch: Batch, shares: Sequence[Sequence[MicroBatch]], *, step: int, learning_rate: float
    ) -> StepResult:
        """Train on ``batch``, packed as ``shares``; ``step``: how many steps were done before."""
        if not batch.num_tokens:
            log.warning("step %d trains nothing: no answer of its batch has a token that is trained", step + 1)
        names = self._algorithm.advantage_scores | self._algorithm.loss_scores
        if not names:
            return self._backend.step(shares, learning_rate=learning_rate)
        started = time.monotonic()
        scores = {name: self._backend.score(shares, model=SCORED_BY[name]) for name in sorted(names)}
        shares = complete(shares, scores, batch=batch, algorithm=self._algorithm)
        metrics = {"learner/score_seconds": time.monotonic() - started}
        if self.policy_steps(step + 1):
            metrics |= self._backend.step(shares, learning_rate=learning_rate).metrics
        else:
            metrics["learner/learning_rate"] = 0.0
        if "critic" in self._algorithm.models:
            result = self._backend.step(shares, learning_rate=self._critic_learning_rate, model="critic")
            metrics |= result.metrics
        return StepResult(metrics=metrics)
