"""The distance of a policy from a reference: estimates of KL(policy || reference) from the logprobs of each token.

Each estimate takes ``logprobs`` and ``ref_logprobs`` f32[M] of tokens that the policy sampled, and returns nats f32[M].
Which one to use:

    in the reward (token_rewards)   k1: exact in expectation
    in the loss, on policy          k2: its gradient is that of the reverse KL. The gradient of k1 is zero in
                                    expectation, that of k3 is the forward KL's (both tested by enumeration,
                                    tests/unit/policies/losses/test_kl.py)
    in the loss, off policy         unbiased: k3 times the ratio to the sampling policy; the ratio must keep its
                                    gradient
    for monitoring                  k3: never negative, unbiased, low variance

Gradients flow only through ``logprobs``. k3 clamps the log ratio before exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncrl.policies.losses.ratios import log_ratio, ratio
from asyncrl.policies.losses.segments import Array

Estimate = Literal["k1", "k2", "k3", "absolute", "low_variance", "unbiased", "k3_weighted"]

CORRECTED: Final = ("unbiased", "k3_weighted")
"""Estimates that are weighted by the ratio to the policy that sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """coef x the estimate of KL(policy || reference), added to every token's loss or subtracted from its reward."""

    coef: float
    estimate: Estimate
    place: Literal["loss", "reward"]

    def __call__(self, logprobs: Array, ref_logprobs: Array, behavior_logprobs: Array) -> torch.Tensor:
        """Return coef x nats, with gradient in ``logprobs``.  f32[M] x 3 -> f32[M]"""
        if self.estimate in CORRECTED:
            is_live = self.estimate == "unbiased"
            return self.coef * unbiased(logprobs, ref_logprobs, behavior_logprobs, is_ratio_live=is_live)
        estimates = {"k1": k1, "k2": k2, "k3": k3, "absolute": absolute, "low_variance": low_variance}
        return self.coef * estimates[self.estimate](logprobs, ref_logprobs)


def k1(logprobs: Array, ref_logprobs: Array) -> torch.Tensor:
    """log(policy / reference): unbiased, of either sign.  f32[M] x 2 -> f32[M].  joschu.net/blog/kl-approx.html"""
    return log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Array, ref_logprobs: Array) -> torch.Tensor:
    """Half the squared log ratio: biased in value, exact in gradient on policy.  f32[M] x 2 -> f32[M], >= 0"""
    return log_ratio(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Array, ref_logprobs: Array) -> torch.Tensor:
    """e^d - d - 1 with d = log(reference / policy): unbiased.  f32[M] x 2 -> f32[M], >= 0"""
    d = -log_ratio(logprobs, ref_logprobs)
    return d.exp() - d - 1.0


def absolute(logprobs: Array, ref_logprobs: Array) -> torch.Tensor:
    """|log(policy / reference)|: a distance, not an estimate of KL.  f32[M] x 2 -> f32[M], >= 0.  verl's "abs"."""
    return log_ratio(logprobs, ref_logprobs).abs()


def low_variance(logprobs: Array, ref_logprobs: Array, *, limit: float = 10.0) -> torch.Tensor:
    """k3, at most ``limit`` nats, so that no token dominates the batch's gradient.  f32[M] x 2 -> f32[M]

    It is verl's low_var_kl. slime clamps only the result; AReaL clamps the results of k1, k2 and k3.
    """
    return k3(logprobs, ref_logprobs).clamp(-limit, limit)


def unbiased(
    logprobs: Array, ref_logprobs: Array, behavior_logprobs: Array, *, is_ratio_live: bool = True
) -> torch.Tensor:
    """k3 times the ratio of the policy to the sampling policy; valid for any such policy.  f32[M] x 3 -> f32[M], >= 0

    With gradient in the ratio, the expected gradient is exact (per token: ratio x log(policy / reference)). With a
    detached ratio ("k3_weighted") it is biased like that of k3. Source: DeepSeek-V3.2, arXiv:2512.02556 eq. 7; TRL
    use_bias_correction_kl, NeMo-RL. slime uses the ratio to the recomputed old policy, which is right only for tokens
    of that policy.
    """
    weight = ratio(logprobs, behavior_logprobs)
    return (weight if is_ratio_live else weight.detach()) * k3(logprobs, ref_logprobs)
