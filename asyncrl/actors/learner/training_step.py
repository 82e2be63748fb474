"""What one step of the learner is when an algorithm needs more models than the policy.

    score (critic, reference, teacher, policy) -> advantages and returns -> step the policy -> step the critic

With learner.steps_per_batch each part of the batch is an optimizer step, one after the other, of the policy and then of
the critic. The policy is scored before the first: all of them are around that proximal policy, and the batch's tokens
are as stale as they were then. A part whose loss is not finite changes nothing; the others count.

Blocking: the learner calls it in the backend's thread. Batches are packed ahead; only what depends on the present
weights happens here. An algorithm that needs no other model gets ``backend.step`` and nothing else. For the first
``critic_warmup_steps`` steps the critic learns alone: each makes a policy version all the same, with the weights of the
one before, so step n always makes version n.

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

from asyncrl.config.layout import Layout
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import SCORED_BY, Algorithm
from asyncrl.policies.batching.apply_scores import complete
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.learning_rate import Schedule
from asyncrl.protocols import Backend, Rehearsing, StepResult

MOST_RANKS: Final = 64
"""Of more of them a row of metrics says nothing."""

log = logging.getLogger("asyncrl.learner")

Parts: TypeAlias = Sequence[Sequence[Sequence[MicroBatch]]]
"""``parts[i][r]`` is what data-parallel rank r trains in the batch's optimizer step i."""


class TrainingStep:
    """Holds nothing that changes: which steps are warm-up follows from the step's number, so a resumed run goes on."""

    def __init__(
        self,
        backend: Backend,
        *,
        algorithm: Algorithm,
        critic_learning_rate: float = 0.0,
        critic_warmup_steps: int = 0,
        layout: Layout | None = None,
    ) -> None:
        """layout: of the backend's ranks, for metrics of each"""
        self._backend = backend
        self._algorithm = algorithm
        self._critic_learning_rate = critic_learning_rate
        self._critic_warmup_steps = critic_warmup_steps
        self._layout = layout or Layout()

    def policy_steps(self, steps: int) -> int:
        """How many of the first ``steps`` steps trained the policy."""
        return max(0, steps - self._critic_warmup_steps)

    def learning_rate(self, step: int, *, schedule: Schedule) -> float:
        """Of the step after ``step`` steps. The schedule counts those that train the policy."""
        return schedule.at(self.policy_steps(step + 1))

    def rehearse(self, batch: Batch, parts: Parts, *, step: int) -> str:
        """All of a step but its updates: why it cannot be done, "" when it can. Raises what the step would raise.

        A backend that cannot rehearse is asked for the policy's scores of the same tokens.
        """
        models = [name for name in ("critic",) if name in self._algorithm.models]
        if self.policy_steps(step + 1):
            models = ["policy", *models]
        for model in models:
            for dp_shards in self._scored(batch, parts):
                if not isinstance(self._backend, Rehearsing):
                    self._backend.score(dp_shards, model=model)
                elif is_skipped(self._backend.rehearse(dp_shards, model=model).metrics, model=model):
                    return "its loss or its gradient is not finite"
        return ""

    def __call__(self, batch: Batch, parts: Parts, *, step: int, learning_rate: float) -> StepResult:
        """Train on ``batch``, packed as ``parts``; ``step``: how many steps were done before."""
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
        if "critic" in self._algorithm.models and not is_skipped(metrics):  # else the batch may be trained again
            metrics |= self._critic_steps(scored).metrics
        return StepResult(metrics=metrics, tokens=tokens)

    def _of_ranks(self, parts: Parts) -> dict[str, float]:
        """What each of several ranks has to train."""
        layout = self._layout
        if not 1 < layout.ranks <= MOST_RANKS:
            return {}
        shares = [sum(one.num_tokens for part in parts for one in part[share]) for share in range(layout.data_parallel)]
        return {f"learner/rank{rank}/tokens": float(shares[layout.share(rank)]) for rank in range(layout.ranks)}

    def _scored(self, batch: Batch, parts: Parts) -> Parts:
        """``parts`` with what the algorithm asks of other models, and of the policy as it is now."""
        names = self._algorithm.advantage_scores | self._algorithm.loss_scores
        if not (names or self._algorithm.batch_scores):
            return parts
        shares = [[one for share in of_rank for one in share] for of_rank in zip(*parts, strict=True)]
        scores = {name: self._backend.score(shares, model=SCORED_BY[name]) for name in sorted(names)}
        rows = [iter(share) for share in complete(shares, scores, batch=batch, algorithm=self._algorithm)]
        return [[[next(row) for _ in share] for row, share in zip(rows, part, strict=True)] for part in parts]

    def _steps(self, parts: Parts, *, learning_rate: float, model: str) -> StepResult:
        """An optimizer step on each part; metrics of all of them, and what each thought of the tokens of its own.

        What the first one raises leaves the model as it was. Once a step has changed it, the batch cannot be trained
        again without some of its groups: what a later one raises is a BackendError.
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
        """The policy's step is done: it cannot be repeated without the groups that this one fails with."""
        try:
            return self._steps(parts, learning_rate=self._critic_learning_rate, model="critic")
        except Exception as error:
            raise BackendError(f"the critic's step failed: {type(error).__name__}: {error}") from error


def made_one(made: Sequence[Mapping[str, float]], *, model: str = "policy") -> dict[str, float]:
    """Metrics of one batch from those of its optimizer steps: means, but the largest of what is a largest.

    A batch is skipped when none of its steps changed a weight; how many did not is learner/skipped_parts.
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
    """Whether a step changed no weights because its loss or its gradient was not finite."""
    return bool(metrics.get(f"{_prefix(model)}/skipped_steps", 0.0))
