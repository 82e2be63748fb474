"""From token rewards to token advantages: returns-to-go, REINFORCE++ and GAE.

The M response tokens of S answers are concatenated; ``sequence`` i64[M] is non-decreasing. Observation tokens are left
out. By default a running value is *carried* over an observation (verl, AReaL, NeMo-RL). With ``observations`` "reset",
the value ends at each observation (SkyRL's REINFORCE++). ``positions`` i64[M] is the position of each token in its
answer; a gap in it is an observation. Frameworks that treat observations as steps (slime, OpenRLHF) learn values of
tokens that the policy did not choose; this is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Advantage, Floats
from asyncrl.policies.component import Positive, Share

Observations = Literal["carry", "reset"]
Std = Literal["unbiased", "biased"]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns(Advantage):
    """Discounted sum of a token's reward and all later rewards of the same answer, as in OpenRLHF and verl."""

    name = "reinforce"
    paper = "Williams 1992"
    has_group_baseline = False

    gamma: Share = 1.0
    observations: Observations = "carry"

    def formula(self, token_rewards: Floats, sequence: Ints, positions: Ints | None) -> Floats:
        ends = _ends(sequence, observations=self.observations, positions=positions)
        return _running_sums(token_rewards, ends, decay=self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(Advantage):
    """Returns-to-go, whitened over the trained tokens of the whole batch.

    The defaults of ``std`` ("unbiased") and eps are those of verl; OpenRLHF divides by the biased deviation.
    """

    name = "reinforce_pp"
    paper = "REINFORCE++, arXiv:2501.03262"
    has_group_baseline = False

    gamma: Share = 1.0
    observations: Observations = "carry"
    eps: Positive = 1e-8
    std: Std = "unbiased"

    @property
    def is_whitened(self) -> bool:
        return True

    def formula(
        self, token_rewards: Floats, sequence: Ints, positions: Ints | None, is_trained: Bools | None
    ) -> Floats:
        returns = Returns(gamma=self.gamma, observations=self.observations)
        return whiten(returns.formula(token_rewards, sequence, positions), is_trained, std=self.std, eps=self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePPBaseline(Advantage):
    """Reward minus the mean of its group, on every token, whitened over the trained tokens of the whole batch.

    There is no standard deviation per group. The group mean includes members without trained tokens.
    """

    name = "reinforce_pp_baseline"
    paper = "REINFORCE++, arXiv:2501.03262, the variant with a baseline; as verl"

    eps: Positive = 1e-8
    std: Std = "unbiased"

    @property
    def is_whitened(self) -> bool:
        return True

    def formula(
        self, rewards: Floats, group: Ints, sequence: Ints, rollout: Ints | None, is_trained: Bools | None
    ) -> Floats:
        _, member = np.unique(group, return_inverse=True)
        first = np.arange(len(group)) if rollout is None else np.unique(rollout, return_index=True)[1]
        means = np.bincount(member[first], weights=rewards[first]) / np.bincount(member[first])
        return whiten((rewards - means[member])[sequence], is_trained, std=self.std, eps=self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(Advantage):
    """Generalised advantage estimates, whitened over the trained tokens, and the returns that a critic learns.

    The returns are advantage + value, before whitening. The value after the last token of an answer is 0 because the
    episode is over; with ``truncated`` "bootstrap", a truncated answer uses the critic's value instead. ``whitening``
    "none" leaves the estimates unchanged. With ``observations`` "reset", each stretch between observations is its own
    episode.

    gamma = lam = 1 as in slime, AReaL, OpenRLHF and verl; verl and OpenRLHF always whiten.
    """

    name = "gae"
    paper = "arXiv:1506.02438 eq. 16"
    has_group_baseline = False
    learns_values = True

    gamma: Share = 1.0
    lam: Share = 1.0
    truncated: Literal["end", "bootstrap"] = "end"
    observations: Observations = "carry"
    whitening: Literal["unbiased", "biased", "none"] = "unbiased"
    eps: Positive = 1e-8

    @property
    def is_whitened(self) -> bool:
        return self.whitening != "none"

    def formula(
        self,
        token_rewards: Floats,
        values: Floats,
        sequence: Ints,
        is_truncated: Bools,
        final_values: Floats,
        positions: Ints | None,
        is_trained: Bools | None,
    ) -> tuple[Floats, Floats]:
        ends = _ends(sequence, observations=self.observations, positions=positions)
        following = np.where(ends, 0.0, np.append(values[1:], 0.0))
        if self.truncated == "bootstrap":
            last = _ends(sequence)
            following[last] = np.where(is_truncated, final_values, 0.0)[sequence[last]]
        errors = token_rewards + self.gamma * following - values
        estimates = _running_sums(errors, ends, decay=self.gamma * self.lam)
        returns = estimates + values
        if self.whitening == "none":
            return estimates, returns
        return whiten(estimates, is_trained, std=self.whitening, eps=self.eps), returns


def whiten(values: Floats, is_trained: Bools | None = None, *, std: Std = "unbiased", eps: float = 1e-8) -> Floats:
    """Return (values - mean) / sqrt(variance + eps).  [M] -> f64[M]

    Mean and variance are over the tokens in ``is_trained`` bool[M], by default all; the other tokens are shifted and
    scaled by the same numbers. A batch of one token or of equal values gives zeros.
    """
    counted = values if is_trained is None else values[is_trained]
    if not len(counted):
        return values
    mean = counted.sum() / len(counted)
    variance = np.square(counted - mean).sum() / max(len(counted) - 1 if std == "unbiased" else len(counted), 1)
    whitened: Floats = (values - mean) / np.sqrt(variance + eps)
    return whitened


def _ends(sequence: Ints, *, observations: Observations = "carry", positions: Ints | None = None) -> Bools:
    """Mark the last token of each running sum.  bool[M].  Raises ValueError for "reset" without positions."""
    ends = np.append(sequence[1:] != sequence[:-1], True)[: len(sequence)]
    if observations == "carry":
        return ends
    if positions is None:
        raise ValueError('observations="reset" needs the positions of the tokens: a gap in them is an observation')
    gaps: Bools = ends | np.append(np.diff(positions) != 1, True)[: len(sequence)]
    return gaps


def _running_sums(values: Floats, ends: Bools, *, decay: float) -> Floats:
    """Return s[t] = values[t] + decay x s[t+1], restarting after each end.

    All stretches advance together, backwards from their last tokens, so the loop has as many steps as the longest
    stretch has tokens.
    """
    result = values.copy()
    stops = np.flatnonzero(ends)
    lengths = np.diff(stops, prepend=-1)
    for back in range(1, int(lengths.max(initial=0))):
        places = stops[lengths > back] - back
        result[places] += decay * result[places + 1]
    return result
