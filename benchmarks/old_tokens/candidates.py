"""Guards that the package does not have, tried here: each a formula, its source, and vectors in tests.

mu: the policy that sampled; r = pi / mu; A: advantage; sg stops gradients. The losses weight by r themselves, so their
arms have correction = "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Floats
from asyncrl.policies.component import ClipWidth, Positive, Share
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import difference, finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, spread

_LEAST: Final = 1e-6
"""FlashREINFORCE clamps probabilities to [1e-6, 1 - 1e-6]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGate(Loss):
    """-m sg(r) A logprob: m = 0 for sequences whose mean binary KL(mu || pi) exceeds ``delta``.

    d_t = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) with p = mu, q = pi of the sampled token. The ratio has no cap.
    Source: FlashREINFORCE (NVIDIA, 2026), loss.py; its delta is 1e-3 to 5e-3, its baseline the mean of the batch.
    """

    name = "sequence_gate"
    paper = "FlashREINFORCE"

    delta: Positive = 5e-3

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array, sequence: Array, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p = finite(behavior_logprobs).detach().exp().clamp(_LEAST, 1 - _LEAST)
        q = finite(logprobs).detach().exp().clamp(_LEAST, 1 - _LEAST)
        distance = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        masked = spread(segment_mean(distance, sequence, num_sequences=num_sequences) > self.delta, sequence)
        weight = ratio(logprobs, behavior_logprobs).detach()
        loss = -weight * as_floats(advantages).detach() * finite(logprobs)
        return loss.where(~masked, 0.0), masked


@dataclass(frozen=True, slots=True, kw_only=True)
class ESTR(Loss):
    """-M min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), M = 1 where (log r)^2 / (H + eps) <= tau.

    H is the entropy of mu at the token, in nats. Source: arXiv:2607.22186, read in notes only: its tau is unknown, and
    the default here is about the .99 quantile of fresh tokens' statistic after one step of the tiny tasks.
    """

    name = "estr"
    paper = "arXiv:2607.22186"

    tau: Positive = 0.25
    eps: Positive = 0.01
    clip_low: ClipWidth = 0.2
    clip_high: ClipWidth = 0.2

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array, model_outputs: Mapping[str, Array]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        statistic = difference(finite(logprobs).detach(), behavior_logprobs).square() / (
            as_floats(model_outputs["behavior_entropy"]) + self.eps
        )
        rejected = statistic > self.tau
        loss, clipped = _clipped(logprobs, behavior_logprobs, advantages, 1 - self.clip_low, 1 + self.clip_high)
        return loss.where(~rejected, 0.0), rejected | clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SAT(Loss):
    """-min(r A, clip(r, 1 - clip c_minus, 1 + clip c_plus) A): the clip on the side of the drift shrinks in the tail.

    d = sg(log r), q = the ``quantile`` of |d| over the micro-batch's tokens; k = 1 if |d| <= q, else
    1 / (1 + ((|d| - q) / q)^2). c_plus = k where d > 0, c_minus = k where d < 0, and 1 otherwise.
    Source: arXiv:2607.18722, read in notes only; the kernel's exact form is unknown, this one is ours.
    """

    name = "sat"
    paper = "arXiv:2607.18722"

    quantile: Share = 0.9
    clip: ClipWidth = 0.2

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        moved = difference(finite(logprobs).detach(), behavior_logprobs)
        distance = moved.abs()
        usual = distance.quantile(self.quantile) if distance.numel() else distance.sum()
        kept = 1 / (1 + ((distance - usual).clamp(min=0) / usual.clamp(min=1e-12)).square())
        high = 1 + self.clip * kept.where(moved > 0, 1.0)
        low = 1 - self.clip * kept.where(moved < 0, 1.0)
        return _clipped(logprobs, behavior_logprobs, advantages, low, high)


def _clipped(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    low: float | torch.Tensor,
    high: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped loss around mu, and where the clip is active."""
    advantage = as_floats(advantages).detach()
    weight = ratio(logprobs, behavior_logprobs)
    bounded = weight.clamp(torch.as_tensor(low), torch.as_tensor(high))
    return -torch.minimum(weight * advantage, bounded * advantage), bounded * advantage < weight * advantage


def brace(
    values: Floats,
    final_values: Floats,
    rewards: Floats,
    ratios: Floats,
    sequence: NDArray[np.int64],
    *,
    trace: float = 1.0,
    most_ratio: float = 1.2,
    most_trace: float = 1.1,
) -> tuple[Floats, Floats]:
    """Return advantages and the critic's targets, f64[M] each, of M tokens of B answers; a reward comes at the end.

    V*_T = R and V*_s = V_s + rho_s (V_{s+1} - V_s) + c_s (V*_{s+1} - V_{s+1}) with rho = min(most_ratio, r) and
    c = trace min(most_trace, r); A_s = V*_{s+1} - V_s. V_T is the value after the last token.
    Source: BRACE, arXiv:2609.09783, read in notes only; the lambda of ``trace`` is unknown, gamma is 1 here, and its
    horizon of 100 tokens is longer than any answer here.

    values f64[M], final_values f64[B]: of the critic;  ratios f64[M]: r;  sequence i64[M]: non-decreasing
    """
    targets = np.empty(len(values))
    following = np.empty(len(values))  # V*_{s+1}
    for s in range(len(values) - 1, -1, -1):
        ends = s + 1 == len(values) or sequence[s + 1] != sequence[s]
        after = final_values[sequence[s]] if ends else values[s + 1]
        following[s] = rewards[sequence[s]] if ends else targets[s + 1]
        moved = min(most_ratio, ratios[s]) * (after - values[s])
        targets[s] = values[s] + moved + trace * min(most_trace, ratios[s]) * (following[s] - after)
    return following - values, targets


def damp_repeated(
    gradient: torch.Tensor, before: torch.Tensor, *, low: float = 0.1, high: float = 0.7, kept: float = 0.0
) -> torch.Tensor:
    """Return gradients with less of the part along those of the step before.  f32[A, P] x 2 -> f32[A, P]

    cosine <= low: unchanged. low < cosine < high: g - (1 - kept) <g, u> u with u = g_before / |g_before|. Else 0, a
    step that only momentum takes. Source: GAC, arXiv:2603.01501, read in notes only; the thresholds are ours.
    """
    cosine = torch.nn.functional.cosine_similarity(gradient, before, dim=1)[:, None]
    along = (gradient * before).sum(1, keepdim=True) / before.square().sum(1, keepdim=True).clamp(min=1e-30)
    damped = torch.where(cosine > low, gradient - (1 - kept) * along * before, gradient)
    return torch.where(cosine >= high, 0.0, damped)
