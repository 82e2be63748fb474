"""Aggregation of token losses: a weight for each token of the whole batch, computed before the batch is split.

The batch's loss is the sum of loss x weight over all its tokens (``total``), so gradients do not depend on how the
batch is split into micro-batches and data-parallel ranks (tests/unit/policies/losses/test_aggregation.py).

A formula takes the masks of the trained tokens, [B] bool[T] for the batch's B answers, and returns their weights,
[B] f32[T]. Masks of 0 and 1 as float64 give float64 weights. An answer here is a whole rollout: its parts count
together, as one answer with all their tokens.

What a correction rejects is known only in the micro-batch. ``Algorithm.denominator`` selects the divisor, as frameworks
differ. "before" uses the counts of these masks, so rejecting tokens makes the loss smaller (verl's weights, AReaL,
slime, NeMo-RL). "after" uses the counts of the kept tokens (SkyRL, ROLL), and needs to know ``divides_by`` of the
aggregation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from asyncrl.policies.component import Component, Positive
from asyncrl.policies.losses.segments import Array, as_floats

Masks = Sequence[NDArray[Any]]
Weights = list[NDArray[Any]]
Counted = Literal["count", "skip"]
"""Whether an answer or prompt without a trained token counts in a mean over answers or prompts.

"count" (verl, AReaL) counts it, so masking one answer does not raise the weight of another. "skip" divides by the
number of those with trained tokens.
"""


def total(loss: Array, weights: Array) -> torch.Tensor:
    """Return the sum of loss x weight; a weight of 0 silences its token even if the loss is nan.  [M] x 2 -> number

    The totals of micro-batches and ranks add up to the batch's loss.
    """
    weight = as_floats(weights)
    return (torch.where(weight == 0, 0.0, as_floats(loss)) * weight).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Component):
    """Base of the aggregations.

    divides_by  unit whose tokens the denominator counts, so that rejection may change it: "batch", "prompt" or
                "sequence"; empty if the denominator counts answers or nothing
    """

    divides_by: ClassVar[Literal["batch", "prompt", "sequence", ""]] = ""

    def __call__(self, masks: Masks, *, group: ArrayLike, rollout: ArrayLike | None = None) -> Weights:
        """Return the weight of each trained token in the batch's loss.  [B] bool[T], prompt group i64[B] -> [B] f32[T]

        rollout  i64[B], non-decreasing: rollout that a sequence is a part of; None if each sequence is a rollout
        """
        if rollout is None:
            return self._of_answers(masks, np.asarray(group))
        firsts = np.unique(np.asarray(rollout), return_index=True)[1]
        rollouts = [masks[begin:end] for begin, end in itertools.pairwise([*firsts, len(masks)])]
        whole = self._of_answers([np.concatenate(parts) for parts in rollouts], np.asarray(group)[firsts])
        return [
            part
            for weights, parts in zip(whole, rollouts, strict=True)
            for part in np.split(weights, np.cumsum([len(mask) for mask in parts])[:-1])
        ]

    def _of_answers(self, masks: Masks, group: NDArray[Any]) -> Weights:
        known = {"masks": masks, "group": group}
        made: Weights = self.formula(**{name: known[name] for name in self.inputs})
        return made

    def at_most(self, max_response_tokens: int) -> Self:
        """Return the aggregation with the run's longest response, if it divides by that."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMean(Aggregation):
    """Every token of the batch has the same weight: 1 / (number of trained tokens).

    The default of verl, NeMo-RL, AReaL, prime-rl and TRL's dapo.
    """

    name = "token_mean"
    paper = "DAPO, arXiv:2503.14476 section 3.3"
    divides_by = "batch"

    def formula(self, masks: Masks) -> Weights:
        return _weights(masks, np.full(len(masks), _counts(masks).sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSum(Aggregation):
    """Every token has weight 1, so the step grows with the batch's tokens."""

    name = "token_sum"

    def formula(self, masks: Masks) -> Weights:
        return _weights(masks, np.ones(len(masks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMeanTokenMean(Aggregation):
    """Every answer has the same weight, shared by its tokens: 1 / (B x its tokens).

    A token of a long answer weighs less. slime's default; also the aggregation of GSPO.
    """

    name = "seq_mean_token_mean"
    paper = "GRPO, arXiv:2402.03300 eq. 3"
    divides_by = "sequence"

    masked_answers: Counted = "count"

    def formula(self, masks: Masks) -> Weights:
        return _weights(masks, _num_counted(masks, self.masked_answers) * _counts(masks))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMeanTokenSum(Aggregation):
    """Every token has weight 1 / B, so long answers weigh more."""

    name = "seq_mean_token_sum"

    masked_answers: Counted = "count"

    def formula(self, masks: Masks) -> Weights:
        return _weights(masks, np.full(len(masks), _num_counted(masks, self.masked_answers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMeanTokenSumNorm(Aggregation):
    """Every token has weight 1 / (B x constant), independent of the lengths of answers.

    The constant is the run's longest allowed response, rollout.max_new_tokens unless set, not the padded length of a
    batch.
    """

    name = "seq_mean_token_sum_norm"
    paper = "Dr. GRPO, arXiv:2503.20783 section 3.2"

    max_response_tokens: Positive = 1024.0
    masked_answers: Counted = "count"

    def formula(self, masks: Masks) -> Weights:
        num_answers = _num_counted(masks, self.masked_answers)
        return _weights(masks, np.full(len(masks), num_answers * self.max_response_tokens))

    def at_most(self, max_response_tokens: int) -> Self:
        return replace(self, max_response_tokens=float(max_response_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMean(Aggregation):
    """Every prompt has the same weight, shared by its group's tokens: 1 / (prompts x tokens of its group). As SkyRL."""

    name = "prompt_mean"
    paper = "ScaleRL, arXiv:2510.13786"
    divides_by = "prompt"

    masked_prompts: Counted = "count"

    def formula(self, masks: Masks, group: ArrayLike) -> Weights:
        names, member = np.unique(np.asarray(group), return_inverse=True)
        per_group = np.bincount(member, weights=_counts(masks), minlength=len(names))
        num_prompts = len(names) if self.masked_prompts == "count" else int(np.count_nonzero(per_group))
        return _weights(masks, num_prompts * per_group[member])


AGGREGATIONS: dict[str, type[Aggregation]] = {
    aggregation.name: aggregation
    for aggregation in (
        TokenMean,
        TokenSum,
        SeqMeanTokenMean,
        SeqMeanTokenSum,
        SeqMeanTokenSumNorm,
        PromptMean,
    )
}
"""The aggregations that a run file can name (algorithm.aggregation)."""


def _counts(masks: Masks) -> NDArray[np.float64]:
    return np.array([np.count_nonzero(mask) for mask in masks], np.float64)


def _num_counted(masks: Masks, masked: Counted) -> int:
    return len(masks) if masked == "count" else int(np.count_nonzero(_counts(masks)))


def _weights(masks: Masks, divisors: NDArray[np.generic]) -> Weights:
    """Return 1 / divisor for each trained token; a divisor of 0 means an answer or batch without trained tokens."""
    return [_share(mask, max(float(divisor), 1.0)) for mask, divisor in zip(masks, divisors, strict=True)]


def _share(mask: NDArray[Any], divisor: float) -> NDArray[Any]:
    shares: NDArray[Any] = mask.astype(np.float64 if mask.dtype == np.float64 else np.float32)
    shares /= divisor
    return shares
