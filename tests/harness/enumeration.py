"""A policy-gradient problem small enough to enumerate: every sequence of T tokens out of V, with its probability.

Gradients are computed by hand (softmax scores), so this file shares no code with the estimators it judges; it only
takes their weights. The bias of an estimator is the difference between its expectation and sum_y pi(y) R(y) grad log
pi(y) (policy gradient theorem).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Bias of one estimator against the exact gradient; variance_trace is for the gradient of one sequence."""

    rel_bias: float
    cosine: float
    variance_trace: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """sequences i64[N, T];  logprobs, behavior_logprobs f64[N, T];  rewards f64[N]

    scores f64[N, T, K]: gradient of each token's logprob for the K = contexts x V logits of the target policy.
    """

    sequences: NDArray[np.int64]
    logprobs: Floats
    behavior_logprobs: Floats
    scores: Floats
    rewards: Floats
    baseline: float

    @property
    def probabilities(self) -> Floats:
        """Probability of each sequence under the target policy."""
        return np.exp(self.logprobs.sum(1))

    @property
    def behavior_probabilities(self) -> Floats:
        return np.exp(self.behavior_logprobs.sum(1))

    @property
    def exact_gradient(self) -> Floats:
        return np.einsum("n,ntk->k", self.probabilities * self.rewards, self.scores)

    @property
    def flat_log_ratio(self) -> torch.Tensor:
        """f64[N x T], the layout that corrections take."""
        return torch.from_numpy((self.logprobs - self.behavior_logprobs).ravel())

    @property
    def flat_sequence(self) -> torch.Tensor:
        return torch.arange(len(self.sequences)).repeat_interleave(self.sequences.shape[1])

    @property
    def flat_advantages(self) -> torch.Tensor:
        return torch.from_numpy((self.rewards - self.baseline).repeat(self.sequences.shape[1]))

    def judge(self, weights: torch.Tensor | Floats) -> Bias:
        """Return bias and variance of sum_t weight_t (R - baseline) score_t with sequences of the behavior policy.

        weights   f64[N x T] or f64[N, T]; the correction's weights for all sequences
        """
        per_token = np.asarray(weights, np.float64).reshape(self.logprobs.shape)
        advantages = self.rewards - self.baseline
        gradients = np.einsum("n,nt,ntk->nk", advantages, per_token, self.scores)
        mean = self.behavior_probabilities @ gradients
        second_moment = float(self.behavior_probabilities @ np.square(gradients).sum(1))
        exact = self.exact_gradient
        return Bias(
            rel_bias=float(np.linalg.norm(mean - exact) / np.linalg.norm(exact)),
            cosine=float(mean @ exact / (np.linalg.norm(mean) * np.linalg.norm(exact) or 1.0)),
            variance_trace=second_moment - float(mean @ mean),
            norm=float(np.linalg.norm(mean)),
        )


def problem(
    *,
    target: Mapping[str, Sequence[float]],
    behavior: Mapping[str, Sequence[float]],
    length: int,
    reward: Callable[[Sequence[int]], float],
    baseline: float,
) -> Problem:
    """Enumerate all sequences. Policies map a context, "" or the tokens so far as "1,0", to logits f64[V]."""
    contexts = {context: index for index, context in enumerate(target)}
    size = len(target[""])
    sequences = np.array(list(itertools.product(range(size), repeat=length)))
    logprobs, behavior_logprobs = (np.zeros(sequences.shape) for _ in range(2))
    scores = np.zeros((*sequences.shape, len(contexts) * size))
    for n, tokens in enumerate(sequences):
        for t, token in enumerate(tokens):
            context = ",".join(map(str, tokens[:t]))
            normalised = _log_softmax(target[context])
            logprobs[n, t] = normalised[token]
            behavior_logprobs[n, t] = _log_softmax(behavior[context])[token]
            start = contexts[context] * size
            scores[n, t, start : start + size] = np.eye(size)[token] - np.exp(normalised)
    return Problem(
        sequences=sequences,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        scores=scores,
        rewards=np.array([reward(tokens.tolist()) for tokens in sequences]),
        baseline=baseline,
    )


def _log_softmax(logits: Sequence[float]) -> Floats:
    values = np.asarray(logits, np.float64)
    return values - math.log(np.exp(values).sum())
