"""One step of the learner, including the forward passes of other models that an algorithm needs.

    forward (critic, reference, teacher, policy) -> advantages and returns -> step the policy -> step the critic

With learner.steps_per_batch a batch is several mini-batches, one optimizer step each: the policy steps on all of them,
then the critic does. The policy's logprobs are computed before the first step: all mini-batches use that proximal
policy, and the staleness of the batch's tokens counts from it. A mini-batch whose loss is not finite changes nothing;
the others count.

Blocking: the trainer calls it in the backend's thread. Batches are packed ahead; only work that depends on the current
weights happens here. An algorithm that needs no other model gets ``backend.step`` and nothing else. During the first
critic.warmup_steps steps only the critic learns. Each of these steps still makes a policy version, with unchanged
weights, so step n always makes version n.

Tests: tests/actors/learner/test_training_step.py.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.backends.port import Backend, RecordsRouting, RefreshesReference, ResetsOptimizer, StepResult
from asyncrl.config import RunConfig
from asyncrl.config.layout import Layout
from asyncrl.config.models import CriticSection
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import COMPUTED_BY, Algorithm
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.model_outputs import complete
from asyncrl.policies.batching.packing import MiniBatches
from asyncrl.policies.learning_rate import Schedule

MOST_RANKS: Final = 64
"""With more ranks, per-rank metrics are left out of the row."""

log = logging.getLogger("asyncrl.learner")


def learning_rates(run: RunConfig, step: int) -> tuple[float | None, float]:
    """Return the learning rates of policy and critic in the step after ``step`` steps.

    The policy's is None while only the critic learns; its schedule counts the policy's own steps, and without
    decay_steps it decays until the run's last step, as the critic's does.
    """
    learner, critic = run.learner, run.critic or CriticSection()
    schedule = Schedule(
        kind=learner.schedule,
        peak=learner.learning_rate,
        floor=learner.min_learning_rate,
        warmup_steps=learner.warmup_steps,
        steps=learner.decay_steps or run.run.steps - critic.warmup_steps,
    )
    of_critic = Schedule(
        kind=critic.schedule,
        peak=critic.learning_rate or learner.learning_rate,
        floor=critic.min_learning_rate,
        warmup_steps=critic.rate_warmup_steps,
        steps=run.run.steps,
    )
    number = step + 1 - critic.warmup_steps  # of the policy's steps, from 1
    return schedule.at(number) if number > 0 else None, of_critic.at(step + 1)


def train(
    run: RunConfig, backend: Backend, batch: Batch, mini_batches: MiniBatches, *, algorithm: Algorithm, step: int
) -> StepResult:
    """Train on ``batch`` with the learning rates and the settings of the run file. See ``train_batch``."""
    rate, critic_rate = learning_rates(run, step)
    return train_batch(
        backend,
        batch,
        mini_batches,
        algorithm=algorithm,
        step=step,
        learning_rate=rate,
        critic_learning_rate=critic_rate,
        layout=run.learner.layout,
        resets_optimizer=run.learner.reset_optimizer,
        refresh_steps=run.reference.refresh_steps if run.reference else 0,
    )


def train_batch(
    backend: Backend,
    batch: Batch,
    mini_batches: MiniBatches,
    *,
    algorithm: Algorithm,
    step: int,
    learning_rate: float | None,
    critic_learning_rate: float = 0.0,
    layout: Layout | None = None,
    resets_optimizer: bool = False,
    refresh_steps: int = 0,
) -> StepResult:
    """Train on ``batch``, packed as ``mini_batches``.

    step              number of steps done before
    learning_rate     of the policy; None: only the critic learns
    layout            layout of the backend's ranks, for per-rank metrics
    resets_optimizer  forget the optimizers' state after the batch, so that the next one starts anew
    refresh_steps     steps between two refreshes of the reference, as slime's --ref-update-interval; 0: never
    """
    if not batch.num_tokens:
        log.warning("step %d trains nothing: no answer of its batch has a token that is trained", step + 1)
    started = time.monotonic()
    metrics = _rank_metrics(mini_batches, layout or Layout()) | _sharing_metrics(mini_batches)
    completed = _add_outputs(backend, batch, mini_batches, algorithm=algorithm)
    if completed is not mini_batches:
        metrics["learner/forward_seconds"] = time.monotonic() - started
    metrics |= _advantage_metrics(completed)
    tokens: Mapping[int, NDArray[np.float32]] = {}
    if learning_rate is None:
        metrics["learner/learning_rate"] = 0.0
    else:
        result = _train_mini_batches(backend, completed, learning_rate=learning_rate, model="policy")
        metrics, tokens = metrics | dict(result.metrics), result.tokens
    if "critic" in algorithm.models and not is_skipped(metrics):
        try:
            metrics |= _train_mini_batches(
                backend, completed, learning_rate=critic_learning_rate, model="critic"
            ).metrics
        except Exception as error:  # the policy's step is done and cannot be repeated
            raise BackendError(f"the critic's step failed: {type(error).__name__}: {error}") from error
    if resets_optimizer:
        assert isinstance(backend, ResetsOptimizer)  # checked before the run starts
        backend.reset_optimizer()
    if refresh_steps and (step + 1) % refresh_steps == 0:
        assert isinstance(backend, RefreshesReference)
        backend.refresh_reference()
    return StepResult(metrics=metrics, tokens=tokens)


def _rank_metrics(mini_batches: MiniBatches, layout: Layout) -> dict[str, float]:
    """Return the number of tokens that each rank trains, if there are several."""
    if not 1 < layout.ranks <= MOST_RANKS:
        return {}
    shares = [
        sum(one.num_computed for mini_batch in mini_batches for one in mini_batch[share])
        for share in range(layout.data_parallel)
    ]
    return {f"learner/rank{rank}/tokens": float(shares[layout.share(rank)]) for rank in range(layout.ranks)}


def _advantage_metrics(mini_batches: MiniBatches) -> dict[str, float]:
    """Return mean and deviation of the advantages over the batch's trained tokens, as the loss gets them."""
    rows = [one for mini_batch in mini_batches for share in mini_batch for one in share]
    trained = np.concatenate([one.advantages[one.response_mask] for one in rows] or [np.zeros(0, np.float32)])
    if not len(trained):
        return {}
    values = trained.astype(np.float64)
    return {"advantage/mean": float(values.mean()), "advantage/std": float(values.std())}


def _sharing_metrics(mini_batches: MiniBatches) -> dict[str, float]:
    """Return the share of tokens that are not computed because sequences share them, if there are any."""
    rows = [one for mini_batch in mini_batches for share in mini_batch for one in share]
    num_shared = sum(one.num_tokens - one.num_computed for one in rows)
    return {"learner/shared_tokens": num_shared / sum(one.num_tokens for one in rows)} if num_shared else {}


def _add_outputs(backend: Backend, batch: Batch, mini_batches: MiniBatches, *, algorithm: Algorithm) -> MiniBatches:
    """Return ``mini_batches`` with the outputs that the algorithm needs from other models and from the current
    policy."""
    names = algorithm.outputs_for_advantage | algorithm.outputs_for_loss
    if not (names or algorithm.batch_inputs):
        return mini_batches
    # A model sees the whole batch at once: the mini-batches of each rank are joined, then split again.
    shares = [[one for share in of_rank for one in share] for of_rank in zip(*mini_batches, strict=True)]
    known = set.intersection(*({*one.model_outputs, *one.likeliest} for share in shares for one in share))
    outputs = {}
    for name in sorted(names - known):
        if COMPUTED_BY[name] == "policy" and isinstance(backend, RecordsRouting) and backend.records_routing:
            outputs[name] = backend.forward_recorded(shares)
        else:
            outputs[name] = backend.forward(shares, model=COMPUTED_BY[name])
    rows = [iter(share) for share in complete(shares, outputs, batch=batch, algorithm=algorithm)]
    return [
        [[next(row) for _ in share] for row, share in zip(rows, mini_batch, strict=True)] for mini_batch in mini_batches
    ]


def _train_mini_batches(backend: Backend, mini_batches: MiniBatches, *, learning_rate: float, model: str) -> StepResult:
    """Take one optimizer step on each mini-batch. Return joined metrics and the token results of all.

    If the first step raises, the model is unchanged. Once a step has changed it, errors become BackendError.
    """
    results: list[StepResult] = []
    for dp_shards in mini_batches:
        try:
            results.append(backend.step(dp_shards, learning_rate=learning_rate, model=model))
        except Exception as error:
            if all(is_skipped(one.metrics, model=model) for one in results):
                raise
            raise BackendError(
                f"optimizer step {len(results) + 1} of {len(mini_batches)} on the batch failed: {error!r}"
            ) from error
    joined = join_metrics([one.metrics for one in results], model=model)
    if num_skipped := int(joined.get(f"{_prefix(model)}/skipped_mini_batches", 0)):
        log.warning("%d of %d optimizer steps of the %s on a batch were not finite", num_skipped, len(results), model)
    tokens = {sequence: row for one in results for sequence, row in one.tokens.items()}
    return StepResult(metrics=joined, tokens=tokens)


def join_metrics(steps: Sequence[Mapping[str, float]], *, model: str = "policy") -> dict[str, float]:
    """Return the metrics of one batch from those of its optimizer steps: means, or maxima for metrics that are maxima.

    A batch is skipped if none of its steps changed a weight; learner/skipped_mini_batches counts the steps that did
    not."""
    if len(steps) == 1:
        return dict(steps[0])
    skipped = f"{_prefix(model)}/skipped_steps"
    num_skipped = sum(is_skipped(metrics, model=model) for metrics in steps)
    kept = [metrics for metrics in steps if not is_skipped(metrics, model=model)] or steps
    joined = {
        name: (max if name.endswith(_LARGEST) else statistics.fmean)(m[name] for m in kept if name in m)
        for name in dict.fromkeys(name for metrics in kept for name in metrics)
    }
    return joined | {
        skipped: float(num_skipped == len(steps)),
        f"{_prefix(model)}/skipped_mini_batches": float(num_skipped),
    }


_LARGEST: Final = ("_max", "/max", "memory_bytes")


def _prefix(model: str) -> str:
    return "learner" if model == "policy" else model


def is_skipped(metrics: Mapping[str, float], *, model: str = "policy") -> bool:
    """Return whether a step changed no weights because its loss or gradient was not finite."""
    return bool(metrics.get(f"{_prefix(model)}/skipped_steps", 0.0))
