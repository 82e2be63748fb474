"""Advantages that compare the answers to one prompt: GRPO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Floats, GroupAdvantage, centered, of_each_group
from asyncrl.policies.component import NonNegative, Number, Positive

Groups = NDArray[np.int64]

_DDOF: Final = {"unbiased": 1, "biased": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(GroupAdvantage):
    """Reward minus the mean of its group, divided by (standard deviation + eps). Equal rewards give zeros.

    baseline   mean over the whole "group", or over the "others" in the group (leave-one-out)
    std_over   take the standard deviation over the "group", over the "others", or over the rewards of the whole "batch"
               (arXiv:2508.08221, 2510.13786). If the others have equal rewards, there is no division
    singleton  advantage of a group of one, which has no spread: "zero", or its "raw" reward divided by 1 + eps

    The standard deviation is unbiased (G - 1), as in verl, slime, SkyRL and NeMo-RL, which also use this eps (TRL and
    PipelineRL add 1e-4, AReaL 1e-5). A group of one is raw in verl and SkyRL, zero in slime and NeMo-RL. By default
    NeMo-RL takes baseline and deviation over the others; AReaL's mean_leave1out does so for the baseline only.
    prime-rl's GRPO has no standard deviation, which is ``dr_grpo`` here. The batch deviation is over the raw rewards,
    as in TRL; AReaL first subtracts the group mean.
    """

    name = "grpo"
    paper = "arXiv:2402.03300 section 4.1.2"

    eps: Positive = 1e-6
    std: Literal["unbiased", "biased", "none"] = "unbiased"
    std_over: Literal["group", "others", "batch"] = "group"
    baseline: Literal["group", "others"] = "group"
    singleton: Literal["zero", "raw"] = "zero"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        of_batch = self._std(rewards) if self.std_over == "batch" and self.std != "none" else None
        return of_each_group(lambda members: self._of_group(members, of_batch), group, rewards)

    def _of_group(self, rewards: Floats, batch_std: float | None) -> Floats:
        if len(rewards) < 2:
            return rewards / (1.0 + self.eps) if self.singleton == "raw" else np.zeros_like(rewards)
        difference = leave_one_out(rewards) if self.baseline == "others" else centered(rewards)
        if batch_std is not None:
            return difference / (batch_std + self.eps)
        if self.std == "none":
            return difference
        if self.std_over == "others":
            spread = np.array([self._std(np.delete(rewards, place)) for place in range(len(rewards))])
            return difference / np.where(spread > 0, spread + self.eps, 1.0)
        return difference / (self._std(rewards) + self.eps)

    def _std(self, rewards: Floats) -> float:
        """Return the standard deviation; 0 for fewer than two rewards or equal rewards."""
        is_equal = len(rewards) < 2 or bool((rewards == rewards[0]).all())
        return 0.0 if is_equal else float(rewards.std(ddof=_DDOF[self.std]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(GroupAdvantage):
    """Reward minus the mean of its group, without division.

    Dividing by the standard deviation favours questions that are nearly always or nearly never solved. Intended for
    the aggregation ``seq_mean_token_sum_norm``. prime-rl calls this GRPO.
    """

    name = "dr_grpo"
    paper = "Dr. GRPO, arXiv:2503.20783"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        return of_each_group(centered, group, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(GroupAdvantage):
    """Reward minus the mean reward of the other members: G / (G - 1) times ``dr_grpo``.

    A group of one has no others: its advantage is "zero", or the "raw" reward as in verl and SkyRL.
    """

    name = "rloo"
    paper = "arXiv:2402.14740"

    singleton: Literal["zero", "raw"] = "zero"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        return of_each_group(self._of_group, group, rewards)

    def _of_group(self, rewards: Floats) -> Floats:
        if len(rewards) < 2:
            return rewards if self.singleton == "raw" else np.zeros_like(rewards)
        return leave_one_out(rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPG(GroupAdvantage):
    """alpha x (reward minus the group's mean) / f_norm, where alpha compensates for samples without a signal.

    ``count`` selects alpha: all groups / groups whose rewards differ (the paper, eq. 7), or all answers / answers with
    a non-zero reward (verl). A batch without any signal has alpha 1. f_norm is 1 in verl.
    """

    name = "gpg"
    paper = "arXiv:2504.02546"

    f_norm: Positive = 1.0
    count: Literal["nonzero_rewards", "groups_with_variance"] = "groups_with_variance"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        alpha = self.alpha(rewards, group)
        return of_each_group(lambda members: alpha * centered(members) / self.f_norm, group, rewards)

    def alpha(self, rewards: Floats, group: Groups) -> float:
        """Return the number of samples per sample that carries a signal, >= 1.  [B], i64[B] -> number"""
        if self.count == "nonzero_rewards":
            return float(len(rewards) / max(int(np.count_nonzero(rewards)), 1)) if np.any(rewards) else 1.0
        names = np.unique(group)
        varied = sum(1 for name in names if np.ptp(rewards[group == name]) > 0)
        return float(len(names) / varied) if varied else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(GroupAdvantage):
    """(Reward minus the group's mean) / (the group's mean + eps); zeros where the mean is not positive.

    For rewards >= 0. prime-rl adds no eps, SkyRL 1e-6.
    """

    name = "maxrl"
    paper = "arXiv:2602.02710"

    eps: NonNegative = 0.0

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        def of_group(members: Floats) -> Floats:
            mean = members.mean()
            return centered(members) / (mean + self.eps) if mean > 0 else np.zeros_like(members)

        return of_each_group(of_group, group, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class OPO(GroupAdvantage):
    """Reward minus the group's mean reward weighted by response length; the plain mean if no answer has a token.

    This baseline has the least variance if the gradient of each token has about the same norm (eq. 6).
    """

    name = "opo"
    paper = "arXiv:2505.23585"

    def formula(self, rewards: Floats, group: Groups, lengths: NDArray[np.int64]) -> Floats:
        return of_each_group(
            lambda members, sizes: members - self.baseline(members, sizes), group, rewards, lengths.astype(np.float64)
        )

    def baseline(self, rewards: Floats, lengths: Floats) -> float:
        """Return the baseline of one group from its rewards and response lengths.  [G], [G] -> number"""
        return float(np.average(rewards, weights=lengths if lengths.sum() > 0 else None))


@dataclass(frozen=True, slots=True, kw_only=True)
class OPMDAdvantage(GroupAdvantage):
    """Reward minus tau log mean exp(reward / tau) over the group.

    The baseline lies between the mean (large tau) and the best reward. Trinity-RFT calls it "logavgexp"; its "mean" is
    ``dr_grpo``.
    """

    name = "opmd"
    paper = "arXiv:2505.17826"

    tau: Positive = 1.0

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        def of_group(members: Floats) -> Floats:
            scaled = members / self.tau
            top = scaled.max()
            baseline = self.tau * float(top + np.log(np.exp(scaled - top).mean()))
            return members - baseline

        return of_each_group(of_group, group, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsymRE(GroupAdvantage):
    """Reward minus (the group's mean + shift). A shift below 0 favours good answers, which is safer off policy."""

    name = "asymre"
    paper = "arXiv:2506.20520"

    shift: Number = -0.1

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        return of_each_group(lambda members: members - (members.mean() + self.shift), group, rewards)


def leave_one_out(rewards: Floats) -> Floats:
    """Return each reward minus the mean of the others; needs at least two rewards.  [G] -> f64[G]"""
    return centered(rewards) * len(rewards) / (len(rewards) - 1)
