"""Advantages that compare the answers of one prompt: GRPO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Floats, GroupAdvantage, centered, of_each_group
from asyncrl.policies.parts import NonNegative, Number, Positive

Groups = NDArray[np.int64]

_DDOF: Final = {"unbiased": 1, "biased": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(GroupAdvantage):
    """Reward minus the mean of its group, over a standard deviation + eps. All-equal rewards give zeros.

    baseline   the mean of the whole "group", or of the "others" in it (leave-one-out)
    std_over   the standard deviation of the "group", of the "others", or of the rewards of the whole "batch"
               (arXiv:2508.08221, 2510.13786). Others whose rewards are equal do not divide.
    singleton  a group of one has no spread: "zero", or its "raw" reward over 1 + eps

    The standard deviation is unbiased (G - 1), as in verl, slime, SkyRL and NeMo-RL; eps is theirs too (TRL and
    PipelineRL add 1e-4, AReaL 1e-5). A group of one is raw in verl and SkyRL, zero in slime and NeMo-RL. NeMo-RL's
    default takes baseline and deviation of the others, AReaL's mean_leave1out the baseline alone; prime-rl's GRPO has
    no standard deviation, which is ``dr_grpo``. TRL takes the batch's deviation of the rewards as they are, AReaL of
    the rewards minus their group's mean; this is TRL's.
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
        """Standard deviation, 0 for fewer than two rewards and for equal ones."""
        is_equal = len(rewards) < 2 or bool((rewards == rewards[0]).all())
        return 0.0 if is_equal else float(rewards.std(ddof=_DDOF[self.std]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(GroupAdvantage):
    """Reward minus the group's mean, nothing else.

    Dividing by the standard deviation favours questions that are nearly always or nearly never solved. Meant with the
    aggregation ``seq_mean_token_sum_norm``. prime-rl calls this GRPO.
    """

    name = "dr_grpo"
    paper = "Dr. GRPO, arXiv:2503.20783"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        return of_each_group(centered, group, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(GroupAdvantage):
    """Reward minus the mean reward of the other members: G / (G - 1) times ``dr_grpo``.

    A group of one has no others: "zero", or the "raw" reward as in verl and SkyRL.
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
    """alpha x (reward minus the group's mean) / f_norm, where alpha makes up for samples without a signal.

    ``count``: alpha is all groups over those whose rewards differ, as in the paper (eq. 7), or all answers over those
    whose reward is not 0, as in verl. A batch without any signal has alpha 1. verl's f_norm is 1.
    """

    name = "gpg"
    paper = "arXiv:2504.02546"

    f_norm: Positive = 1.0
    count: Literal["nonzero_rewards", "groups_with_variance"] = "groups_with_variance"

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        alpha = self.alpha(rewards, group)
        return of_each_group(lambda members: alpha * centered(members) / self.f_norm, group, rewards)

    def alpha(self, rewards: Floats, group: Groups) -> float:
        """How many samples the batch has for each that carries a signal, >= 1.  [B], i64[B] -> number"""
        if self.count == "nonzero_rewards":
            return float(len(rewards) / max(int(np.count_nonzero(rewards)), 1)) if np.any(rewards) else 1.0
        names = np.unique(group)
        varied = sum(1 for name in names if np.ptp(rewards[group == name]) > 0)
        return float(len(names) / varied) if varied else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(GroupAdvantage):
    """(Reward minus the group's mean) over (that mean + eps); zeros where the mean is not positive. For rewards >= 0.

    prime-rl adds no eps, SkyRL 1e-6.
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
    """Reward minus the mean reward weighted by response length; the plain mean where no answer has a token.

    It is the baseline of least variance if each token's gradient has about the same norm (eq. 6).
    """

    name = "opo"
    paper = "arXiv:2505.23585"

    def formula(self, rewards: Floats, group: Groups, lengths: NDArray[np.int64]) -> Floats:
        return of_each_group(
            lambda members, sizes: members - self.baseline(members, sizes), group, rewards, lengths.astype(np.float64)
        )

    def baseline(self, rewards: Floats, lengths: Floats) -> float:
        """Of one group's rewards and response lengths.  [G], [G] -> number"""
        return float(np.average(rewards, weights=lengths if lengths.sum() > 0 else None))


@dataclass(frozen=True, slots=True, kw_only=True)
class OPMDAdvantage(GroupAdvantage):
    """Reward minus tau log mean exp(reward / tau) over the group: a baseline between the mean (large tau) and the best.

    Trinity-RFT's "logavgexp"; its "mean" is ``dr_grpo``.
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
    """Reward minus (the group's mean + shift). A shift below 0 leans on good answers, which is safer off policy."""

    name = "asymre"
    paper = "arXiv:2506.20520"

    shift: Number = -0.1

    def formula(self, rewards: Floats, group: Groups) -> Floats:
        return of_each_group(lambda members: members - (members.mean() + self.shift), group, rewards)


def leave_one_out(rewards: Floats) -> Floats:
    """Each reward minus the mean of the others, of two or more.  [G] -> f64[G]"""
    return centered(rewards) * len(rewards) / (len(rewards) - 1)
