"""How token losses become one number: a weight per token of the whole batch, decided before it is split.

The batch's loss is the sum of loss x weight over all its tokens (``total``), so gradients do not depend on how the
batch is cut into micro-batches and data-parallel ranks (tests/test_policies_aggregation.py).

Every mode takes the response masks of the batch's B trajectories, [B] bool[T], and gives their weights, [B] f32[T].
Where a correction rejects tokens, ``kept`` are the masks of what is left and ``denominator`` says, explicitly, what the
sums are divided by:

    before  the counts of the response masks: rejecting makes the loss smaller (verl's weights, AReaL, slime, NeMo-RL)
    after   the counts of what is kept: the others gain weight (SkyRL, ROLL)

A trajectory of which nothing is left counts among the B in either case, as in verl, so one rejected answer does not
raise the weight of another's. Where rejection is known only in the micro-batch, ``token_mean`` "after" is the gradient
of "before" times (tokens of the batch / tokens kept in it), counted over all ranks before the optimizer's step;
``seq_mean_token_mean`` "after" is known there, as no answer is cut; ``prompt_mean`` "after" would take a second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from asyncrl.policies.segments import Array, as_floats

Masks = Sequence[NDArray[Any]]
"""bool[T] each. Also 0 and 1 as numbers: weights are float64 where the masks are, otherwise float32."""

Weights = list[NDArray[Any]]
Denominator = Literal["before", "after"]


def total(loss: Array, weights: Array) -> torch.Tensor:
    """Sum of loss x weight, where a weight of 0 silences its token altogether, also a nan.  [M] x 2 -> number

    Those of micro-batches and ranks add up to the batch's loss.
    """
    weight = as_floats(weights)
    return (torch.where(weight == 0, 0.0, as_floats(loss)) * weight).sum()


def token_mean(masks: Masks, *, kept: Masks | None = None, denominator: Denominator = "before") -> Weights:
    """Every token of the batch counts the same: 1 / (number of response tokens).  [B][T] -> [B] f32[T]

    Source: DAPO, arXiv:2503.14476 section 3.3. The default of verl, NeMo-RL, AReaL, prime-rl and TRL's dapo.
    """
    counts = _counts(masks, kept, denominator)
    return _weights(masks, kept, np.full(len(masks), counts.sum()))


def token_sum(masks: Masks, *, kept: Masks | None = None) -> Weights:
    """Every token counts 1: the step grows with the batch's tokens.  [B][T] -> [B] f32[T]"""
    return _weights(masks, kept, np.ones(len(masks)))


def seq_mean_token_mean(masks: Masks, *, kept: Masks | None = None, denominator: Denominator = "before") -> Weights:
    """Every trajectory counts the same, and its tokens share: 1 / (B x its tokens).  [B][T] -> [B] f32[T]

    Source: GRPO, arXiv:2402.03300 eq. 3, and GSPO. A token of a long answer counts less. slime's default.
    """
    return _weights(masks, kept, len(masks) * _counts(masks, kept, denominator))


def seq_mean_token_sum(masks: Masks, *, kept: Masks | None = None) -> Weights:
    """Every token counts 1 / B: long trajectories count more.  [B][T] -> [B] f32[T]"""
    return _weights(masks, kept, np.full(len(masks), len(masks)))


def seq_mean_token_sum_norm(masks: Masks, *, max_response_tokens: float, kept: Masks | None = None) -> Weights:
    """Every token counts 1 / (B x a constant): neither its own length nor others' change a token's weight.

    [B][T] -> [B] f32[T]. The constant is the run's longest allowed response, not the padded length of a batch.
    Source: Dr. GRPO, arXiv:2503.20783 section 3.2.
    """
    return _weights(masks, kept, np.full(len(masks), len(masks) * max_response_tokens))


def prompt_mean(
    masks: Masks, *, group: ArrayLike, kept: Masks | None = None, denominator: Denominator = "before"
) -> Weights:
    """Every prompt counts the same, and its group's tokens share: 1 / (prompts x tokens of its group).

    [B][T], the prompt group of each trajectory i64[B] -> [B] f32[T]. Source: ScaleRL, arXiv:2510.13786; SkyRL.
    """
    names, member = np.unique(np.asarray(group), return_inverse=True)
    per_group = np.bincount(member, weights=_counts(masks, kept, denominator), minlength=len(names))
    return _weights(masks, kept, len(names) * per_group[member])


def _counts(masks: Masks, kept: Masks | None, denominator: Denominator) -> NDArray[np.float64]:
    counted = masks if kept is None or denominator == "before" else kept
    return np.array([np.count_nonzero(mask) for mask in counted], np.float64)


def _weights(masks: Masks, kept: Masks | None, divisors: NDArray[np.generic]) -> Weights:
    """1 / divisor on each token that is left; a divisor of 0 belongs to a trajectory or a batch without tokens."""
    left = masks if kept is None else kept
    return [_share(mask, max(float(divisor), 1.0)) for mask, divisor in zip(left, divisors, strict=True)]


def _share(mask: NDArray[Any], divisor: float) -> NDArray[Any]:
    shares: NDArray[Any] = mask.astype(np.float64 if mask.dtype == np.float64 else np.float32)
    shares /= divisor
    return shares
