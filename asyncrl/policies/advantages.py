"""Rewards to advantages, one number per trajectory. Pure numpy: one group in (G rewards), one number per member out.

Every member of the group counts in its statistics, also one that a correction rejects later. Sums are taken in float64;
the result is float32, or float64 where the rewards are a float64 array. What needs one number per token (returns, GAE,
REINFORCE++) is in returns.py.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Advantages = NDArray[Any]
"""f32, or f64 where the rewards are."""

_DDOF = {"unbiased": 1, "biased": 0}


def grpo(
    rewards: ArrayLike,
    *,
    eps: float = 1e-6,
    std: Literal["unbiased", "biased", "none"] = "unbiased",
    batch_std: float | None = None,
    singleton: Literal["zero", "raw"] = "zero",
) -> Advantages:
    """Reward minus the group's mean, over its standard deviation + eps.  [G] -> f32[G]

    All-equal rewards give zeros. ``batch_std`` (``reward_std`` of the whole batch) divides in place of the group's own:
    arXiv:2508.08221, 2510.13786. A group of one has no spread: zeros, or its ``raw`` reward over 1 + eps.

    Source: GRPO, arXiv:2402.03300 section 4.1.2. The standard deviation is unbiased (G - 1), as in verl, slime, SkyRL
    and NeMo-RL; eps is theirs too (TRL and PipelineRL add 1e-4, AReaL 1e-5). A group of one is raw in verl and SkyRL,
    zero in slime and NeMo-RL; prime-rl's GRPO has no standard deviation, which is ``dr_grpo``.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        alone = values / (1.0 + eps) if singleton == "raw" else np.zeros_like(values)
        return _as_given(alone, rewards)
    centered = _centered(values)
    if batch_std is not None:
        return _as_given(centered / (batch_std + eps), rewards)
    if std == "none":
        return _as_given(centered, rewards)
    return _as_given(centered / (values.std(ddof=_DDOF[std]) + eps), rewards)


def reward_std(rewards: ArrayLike, *, std: Literal["unbiased", "biased"] = "unbiased") -> float:
    """Standard deviation of the raw rewards of a whole batch, for ``grpo(batch_std=...)``; 0 for fewer than two.

    [B] -> number. As TRL's scale_rewards = batch; AReaL takes it after the group's mean is subtracted.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return float(values.std(ddof=_DDOF[std])) if len(values) > 1 else 0.0


def dr_grpo(rewards: ArrayLike) -> Advantages:
    """Reward minus the group's mean, nothing else.  [G] -> f32[G]

    Source: Dr. GRPO, arXiv:2503.20783: dividing by the standard deviation favours questions that are nearly always or
    nearly never solved. Meant with the aggregation ``seq_mean_token_sum_norm``. prime-rl calls this GRPO.
    """
    return grpo(rewards, std="none")


def rloo(rewards: ArrayLike) -> Advantages:
    """Reward minus the mean reward of the other members: G / (G - 1) times ``dr_grpo``.  [G] -> f32[G]

    A group of one has no others: zero (verl and SkyRL keep the raw reward). Source: RLOO, arXiv:2402.14740.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        return _as_given(np.zeros_like(values), rewards)
    return _as_given(_centered(values) * len(values) / (len(values) - 1), rewards)


def gpg(rewards: ArrayLike, *, alpha: float = 1.0, f_norm: float = 1.0) -> Advantages:
    """alpha x (reward minus the group's mean) / f_norm.  [G] -> f32[G]

    ``alpha`` makes up for samples without a signal and is a number of the whole batch (``gpg_alpha``).
    Source: GPG, arXiv:2504.02546; verl's f_norm is 1.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return _as_given(alpha * _centered(values) / f_norm, rewards)


def gpg_alpha(
    rewards: ArrayLike,
    group: ArrayLike,
    *,
    count: Literal["nonzero_rewards", "groups_with_variance"] = "nonzero_rewards",
) -> float:
    """How many samples the batch has for each that carries a signal, >= 1.  [B], i64[B] -> number

    The paper (arXiv:2504.02546 eq. 7) divides by what has a gradient: ``groups_with_variance``, all groups over those
    whose rewards differ, as the row does. verl counts trajectories: all over those whose reward is not 0, this default.
    A batch without any signal gives 1.
    """
    values, index = np.asarray(rewards, dtype=np.float64), np.asarray(group)
    if count == "nonzero_rewards":
        return float(len(values) / max(int(np.count_nonzero(values)), 1)) if np.any(values) else 1.0
    names = np.unique(index)
    varied = sum(1 for name in names if np.ptp(values[index == name]) > 0)
    return float(len(names) / varied) if varied else 1.0


def maxrl(rewards: ArrayLike, *, eps: float = 0.0) -> Advantages:
    """(Reward minus the group's mean) over (that mean + eps); zeros where the mean is not positive.  [G] -> f32[G]

    For rewards >= 0. Source: MaxRL, arXiv:2602.02710; prime-rl adds no eps, SkyRL 1e-6.
    """
    values = np.asarray(rewards, dtype=np.float64)
    mean = values.mean() if len(values) else 0.0
    if mean <= 0:
        return _as_given(np.zeros_like(values), rewards)
    return _as_given(_centered(values) / (mean + eps), rewards)


def opo(rewards: ArrayLike, lengths: ArrayLike) -> Advantages:
    """Reward minus ``opo_baseline``.  [G], lengths in response tokens [G] -> f32[G].  Source: OPO, arXiv:2505.23585."""
    return _as_given(np.asarray(rewards, dtype=np.float64) - opo_baseline(rewards, lengths), rewards)


def opo_baseline(rewards: ArrayLike, lengths: ArrayLike) -> float:
    """Mean reward weighted by response length, the plain mean where no one has a token.  [G], [G] -> number

    It is the baseline of least variance if each token's gradient has about the same norm (arXiv:2505.23585 eq. 6).
    """
    values, weights = np.asarray(rewards, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    if len(values) == 0:
        return 0.0
    return float(np.average(values, weights=weights if weights.sum() > 0 else None))


def _centered(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """values minus their mean; exactly 0 where all are equal, as rounding errors over eps would be a signal."""
    if len(values) == 0 or (values == values[0]).all():
        return np.zeros_like(values)
    centered: NDArray[np.float64] = values - values.mean()
    return centered


def _as_given(values: NDArray[np.float64], rewards: ArrayLike) -> Advantages:
    """float64 for a float64 array, otherwise float32: what torch.as_tensor does with Python numbers."""
    is_double = isinstance(rewards, np.ndarray) and rewards.dtype == np.float64
    return values if is_double else values.astype(np.float32)
