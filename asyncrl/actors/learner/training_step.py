"""One step of the learner, including the scores of other models that an algorithm needs.

    score (critic, reference, teacher, policy) -> advantages and returns -> step the policy -> step the critic

With learner.steps_per_batch each part of the batch is one optimizer step: the policy steps on all parts in turn, then
the critic does. The policy is scored before the first part: all parts use that proximal policy, and the staleness of
the batch's tokens counts from it. A part whose loss is not finite changes nothing; the other parts count.

Blocking: the learner calls it in the backend's thread. Batches are packed ahead; only work that depends on the current
weights happens here. An algorithm that needs no other model gets ``backend.step`` and nothing else. During the first
``critic_warmup_steps`` steps only the critic learns. Each of these steps still makes a policy version, with unchanged
weights, so step n always makes version n.

Tests: tests/actors/learner/test_training_step.py.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.backends.port import Backend, StepResult
from asyncrl.config.layout import Layout
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import SCORED_BY, Algorithm
from asyncrl.policies.batching.apply_scores import complete
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.learning_rate import Schedule

MOST_RANKS: Final = 64
"""With more ranks, per-rank metrics are left out of the row."""

log = logging.getLogger("asyncrl.learner")

Parts: TypeAlias = Sequence[Sequence[Sequence[MicroBatch]]]
"""``parts[i][r]`` is the data of data-parallel rank r in the batch's optimizer step i."""


class TrainingStep:
    """Has no mutable state: the step's number decides which steps are warm-up, so a resumed run continues correctly."""

    def __init__(
        self,
        backend: Backend,
        *,
        algorithm: Algorithm,
        critic_learning_rate: float = 0.0,
        critic_warmup_steps: int = 0,
        layout: Layout | None = None,
    ) -> None:
        """layout: layout of the backend's ranks, for per-rank metrics"""
        self._backend = backend
        self._algorithm = algorithm
        self._critic_learning_rate = critic_learning_rate
        self._critic_warmup_steps = critic_warmup_steps
        self._layout = layout or Layout()

    def policy_steps(self, steps: int) -> int:
        """Return how many of the first ``steps`` steps train the policy."""
        return max(0, steps - self._critic_warmup_steps)

    def learning_rate(self, step: int, *, schedule: Schedule) -> float:
        """Return the learning rate of the step after ``step`` steps. The schedule counts steps of the policy only."""
        return schedule.at(self.policy_steps(step + 1))

    def __call__(self, batch: Batch, parts: Parts, *, step: int, learning_rate: float) -> StepResult:
        """Train on ``batch``, packed as ``parts``. ``step``: number of steps done before."""
        if not batch.num_tokens:
            log.warning("step %d trains nothing: no answer of its batch has a token that is trained", step + 1)
        started, metrics = time.monotonic(), self._of_ranks(parts)
        scored = self._scored(batch, parts)
        if scored is not parts:
            metrics["learner/score_seconds"] = time.monotonic() - started
        tokens: Mapping[int, NDArray[np.float32]] = {}
        if self.policy_steps(step + 1):
            result = self._steps(scored, learning_rate=learning_rate, model="policy")
            metrics, tokens = metrics | dict(result.metrics), result.tokens
        else:
            metrics["learner/learning_rate"] = 0.0
        if "critic" in self._algorithm.models and not is_skipped(metrics):
            metrics |= self._critic_steps(scored).metrics
        return StepResult(metrics=metrics, tokens=tokens)

    def _of_ranks(self, parts: Parts) -> dict[str, float]:
        """Return the number of tokens that each rank trains, if there are several."""
        layout = self._layout
        if not 1 < layout.ranks <= MOST_RANKS:
            return {}
        shares = [sum(one.num_tokens for part in parts for one in part[share]) for share in range(layout.data_parallel)]
        return {f"learner/rank{rank}/tokens": float(shares[layout.share(rank)]) for rank in range(layout.ranks)}

    def _scored(self, batch: Batch, parts: Parts) -> Parts:
        """Return ``parts`` with the scores that the algorithm needs from other models and from the current policy."""
        names = self._algorithm.advantage_scores | self._algorithm.loss_scores
        if not (names or self._algorithm.batch_scores):
            return parts
        shares = [[one for share in of_rank for one in share] for of_rank in zip(*parts, strict=True)]
        scores = {name: self._backend.score(shares, model=SCORED_BY[name]) for name in sorted(names)}
        rows = [iter(share) for share in complete(shares, scores, batch=batch, algorithm=self._algorithm)]
        return [[[next(row) for _ in share] for row, share in zip(rows, part, strict=True)] for part in parts]

    def _steps(self, parts: Parts, *, learning_rate: float, model: str) -> StepResult:
        """Take one optimizer step on each part. Return joined metrics and each part's token results.

        If the first step raises, the model is unchanged. Once a step has changed it, errors become BackendError.
        """
        made: list[StepResult] = []
        for dp_shards in parts:
            try:
                made.append(self._backend.step(dp_shards, learning_rate=learning_rate, model=model))
            except Exception as error:
                if all(is_skipped(one.metrics, model=model) for one in made):
                    raise
                raise BackendError(
                    f"optimizer step {len(made) + 1} of {len(parts)} on the batch failed: {error!r}"
                ) from error
        joined = made_one([one.metrics for one in made], model=model)
        if num_skipped := int(joined.get(f"{_prefix(model)}/skipped_parts", 0)):
            log.warning("%d of %d optimizer steps of the %s on a batch were not finite", num_skipped, len(made), model)
        tokens = {document: row for one in made for document, row in one.tokens.items()}
        return StepResult(metrics=joined, tokens=tokens)

    def _critic_steps(self, parts: Parts) -> StepResult:
        """Step the critic. Its errors become BackendError, as the policy's step is done and cannot be repeated."""
        try:
            return self._steps(parts, learning_rate=self._critic_learning_rate, model="critic")
        except Exception as error:
            raise BackendError(f"the critic's step failed: {type(error).__name__}: {error}") from error


def made_one(made: Sequence[Mapping[str, float]], *, model: str = "policy") -> dict[str, float]:
    """Return the metrics of one batch from those of its optimizer steps: means, or maxima for metrics that are maxima.

    A batch is skipped if none of its steps changed a weight; learner/skipped_parts counts the steps that did not.
    """
    if len(made) == 1:
        return dict(made[0])
    skipped = f"{_prefix(model)}/skipped_steps"
    num_skipped = sum(is_skipped(metrics, model=model) for metrics in made)
    kept = [metrics for metrics in made if not is_skipped(metrics, model=model)] or made
    joined = {
        name: (max if name.endswith(_LARGEST) else statistics.fmean)(m[name] for m in kept if name in m)
        for name in dict.fromkeys(name for metrics in kept for name in metrics)
    }
    return joined | {
        skipped: float(num_skipped == len(made)),
        f"{_prefix(model)}/skipped_parts": float(num_skipped),
    }


_LARGEST: Final = ("_max", "/max", "memory_bytes")


def _prefix(model: str) -> str:
    return "learner" if model == "policy" else model


def is_skipped(metrics: Mapping[str, float], *, model: str = "policy") -> bool:
    """Return whether a step changed no weights because its loss or gradient was not finite."""
    return bool(metrics.get(f"{_prefix(model)}/skipped_steps", 0.0))
