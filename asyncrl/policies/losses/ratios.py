"""Probability ratios with gradient that never produce an infinity or a nan from infinite logprobs."""

from __future__ import annotations

from typing import Final

import torch

from asyncrl.policies.losses.segments import Array, as_floats

MAX_LOG_RATIO: Final = 20.0
"""exp(20) is 5e8: larger than any bound in use, and far below the limit of float32."""

MIN_LOGPROB: Final = -1e4
"""Logprob that replaces -inf, for a token that the policy rules out; it has no gradient."""


def difference(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """Return logprobs - anchor logprobs; 0 if both are the same infinity; nan stays nan. Gradient only in the first."""
    policy, anchor = as_floats(logprobs), as_floats(anchor_logprobs).detach()
    is_same = policy.isinf() & (policy == anchor)
    return (policy - anchor).masked_fill(is_same, 0.0)


def log_ratio(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """Return ``difference`` clamped to +-20. Gradient only in the first argument."""
    return difference(logprobs, anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """Return exp(logprobs - anchor logprobs), in [e^-20, e^20]. Gradient only in the first argument."""
    return log_ratio(logprobs, anchor_logprobs).exp()


def live_one(logprobs: Array) -> torch.Tensor:
    """Return 1 with the gradient of logprobs: weight x live_one has the weight's value and REINFORCE's gradient."""
    return ratio(logprobs, logprobs)


def finite(logprobs: Array) -> torch.Tensor:
    """Return logprobs with a floor, so that a weight of 0 times a logprob is 0."""
    return as_floats(logprobs).clamp(min=MIN_LOGPROB)


def binary_kl(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the KL of {token, any other} between two policies, from the token's logprobs, in nats.  f32[M] x 2"""
    left_other, right_other = _log_of_others(left), _log_of_others(right)
    return left.exp() * (left - right) + left_other.exp() * (left_other - right_other)


def _log_of_others(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), finite even if p rounds to 1."""
    others: torch.Tensor = -torch.expm1(logprobs)
    return others.clamp(min=1e-30).log()
