"""The table of advantages: each a function of advantages.py or returns.py, what it needs of the batch, its options.

Part of catalogue.py, which gathers the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies import advantages, returns

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """A batch as advantages see it: B trajectories, M response tokens end to end.

    rewards  f64[B];  group  i64[B]: which prompt group;  sequence  i64[M]: which trajectory a token belongs to, rising
    is_trained    bool[M]: what moments over the batch are taken of; a truncated answer may be masked. None: all are
    positions     i64[M]: the token's place in its response; a gap is an observation
    is_truncated  bool[B]: cut at the longest allowed answer
    kl            f64[M]: taken off each token's reward

    Where there is a critic, in the present weights:
    values        f64[M]: of the state in which each token was chosen;  final_values  f64[B]: behind the last one
    """

    rewards: NDArray[np.float64]
    group: NDArray[np.int64]
    sequence: NDArray[np.int64]
    is_trained: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    is_truncated: NDArray[np.bool_] | None = None
    kl: NDArray[np.float64] | None = None
    values: NDArray[np.float64] | None = None
    final_values: NDArray[np.float64] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens of each trajectory.  i64[B]"""
        return np.bincount(self.sequence, minlength=len(self.rewards))

    @property
    def token_rewards(self) -> NDArray[np.float64]:
        """The trajectory's reward on its last token, and the KL to the reference on all.  f64[M]"""
        return returns.token_rewards(self.rewards, self.sequence, kl=self.kl, kl_coef=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """per  "group": function(rewards [G], ...) -> [G];  "batch": function(...) -> per token [M]. needs: of Rewarded.

    With "values" among its needs the function gives advantages and returns, what the critic learns.
    """

    name: str
    function: Callable[..., Any]
    per: Literal["group", "batch"] = "group"
    needs: tuple[str, ...] = ("rewards",)
    options: Mapping[str, Any] = field(default_factory=dict)
    has_group_baseline: bool = True
    """A group of one has nothing to compare with."""

    def __call__(self, batch: Rewarded) -> NDArray[np.float32]:
        """Advantage of each response token.  f32[M]"""
        return self.with_returns(batch)[0]

    def with_returns(self, batch: Rewarded) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Advantage of each response token, and its return where a critic learns that.  f32[M] each"""
        if self.per == "group":
            return self._of_groups(batch), None
        made = self.function(*(getattr(batch, name) for name in self.needs), **self.options)
        if "values" not in self.needs:
            return made.astype(np.float32), None
        return made[0].astype(np.float32), made[1].astype(np.float32)

    def _of_groups(self, batch: Rewarded) -> NDArray[np.float32]:
        lengths = batch.lengths
        values = np.zeros(len(batch.rewards), np.float32)
        for name in np.unique(batch.group):
            members = batch.group == name
            table = {"rewards": batch.rewards, "lengths": lengths}
            values[members] = self.function(*(table[need][members] for need in self.needs), **self.options)
        return values[batch.sequence]


def _grpo(
    rewards: Floats,
    group: NDArray[np.int64],
    sequence: NDArray[np.int64],
    *,
    eps: float,
    std: Literal["unbiased", "biased", "none"],
    std_over: Literal["group", "batch"],
    singleton: Literal["zero", "raw"],
) -> Floats:
    """``std_over``: whose standard deviation divides, the group's own or that of the whole batch's rewards."""
    of_batch = advantages.reward_std(rewards, std=std) if std_over == "batch" and std != "none" else None

    def of_group(members: Floats) -> Floats:
        return advantages.grpo(members, eps=eps, std=std, batch_std=of_batch, singleton=singleton)

    return _of_each_group(of_group, rewards, group)[sequence]


def _reinforce(
    token_rewards: Floats,
    sequence: NDArray[np.int64],
    positions: NDArray[np.int64] | None,
    *,
    gamma: float,
    observations: returns.Observations,
) -> Floats:
    return returns.reinforce(token_rewards, sequence, gamma=gamma, observations=observations, positions=positions)


def _reinforce_pp(
    token_rewards: Floats,
    sequence: NDArray[np.int64],
    positions: NDArray[np.int64] | None,
    is_trained: NDArray[np.bool_] | None,
    *,
    gamma: float,
    observations: returns.Observations,
) -> Floats:
    estimates = _reinforce(token_rewards, sequence, positions, gamma=gamma, observations=observations)
    return returns.whiten(estimates, trained=is_trained)


def _reinforce_pp_baseline(
    rewards: Floats, group: NDArray[np.int64], sequence: NDArray[np.int64], is_trained: NDArray[np.bool_] | None
) -> Floats:
    return returns.reinforce_pp_baseline(rewards, group, sequence, trained=is_trained)


def _gae(
    token_rewards: Floats,
    values: Floats,
    sequence: NDArray[np.int64],
    is_truncated: NDArray[np.bool_],
    final_values: Floats,
    positions: NDArray[np.int64] | None,
    is_trained: NDArray[np.bool_] | None,
    *,
    gamma: float,
    lam: float,
    truncated: Literal["end", "bootstrap"],
    observations: returns.Observations,
) -> tuple[Floats, Floats]:
    """Advantages whitened over the batch as in verl and OpenRLHF, returns as they are."""
    estimates, targets = returns.gae(
        token_rewards,
        values,
        sequence,
        gamma=gamma,
        lam=lam,
        bootstrap=np.where(is_truncated, final_values, 0.0) if truncated == "bootstrap" else None,
        observations=observations,
        positions=positions,
    )
    return returns.whiten(estimates, trained=is_trained), targets


def _none(sequence: NDArray[np.int64]) -> Floats:
    return np.zeros(len(sequence))


def _gpg(
    rewards: Floats,
    group: NDArray[np.int64],
    sequence: NDArray[np.int64],
    *,
    f_norm: float,
    count: Literal["nonzero_rewards", "groups_with_variance"],
) -> Floats:
    """``count``: alpha counts the groups with variance (arXiv:2504.02546 eq. 7), or rewards that are not 0 (verl)."""
    alpha = advantages.gpg_alpha(rewards, group, count=count)

    def of_group(members: Floats) -> Floats:
        return advantages.gpg(members, alpha=alpha, f_norm=f_norm)

    return _of_each_group(of_group, rewards, group)[sequence]


def _of_each_group(function: Callable[[Floats], Floats], rewards: Floats, group: NDArray[np.int64]) -> Floats:
    """``function`` of each group's rewards, in the places of its members.  [B], i64[B] -> f64[B]"""
    values = np.zeros(len(rewards))
    for name in np.unique(group):
        values[group == name] = function(rewards[group == name])
    return values


_BATCH = ("rewards", "group", "sequence")
_TOKENS = ("token_rewards", "sequence", "positions")

ADVANTAGES: dict[str, Advantage] = {
    row.name: row
    for row in (
        Advantage(
            name="grpo",
            function=_grpo,
            per="batch",
            needs=_BATCH,
            options={"eps": 1e-6, "std": "unbiased", "std_over": "group", "singleton": "zero"},
        ),
        Advantage(name="dr_grpo", function=advantages.dr_grpo),
        Advantage(name="rloo", function=advantages.rloo),
        Advantage(name="maxrl", function=advantages.maxrl, options={"eps": 0.0}),
        Advantage(name="opo", function=advantages.opo, needs=("rewards", "lengths")),
        Advantage(
            name="gpg",
            function=_gpg,
            per="batch",
            needs=_BATCH,
            options={"f_norm": 1.0, "count": "groups_with_variance"},
        ),
        Advantage(
            name="reinforce",
            function=_reinforce,
            per="batch",
            needs=_TOKENS,
            options={"gamma": 1.0, "observations": "carry"},
            has_group_baseline=False,
        ),
        Advantage(
            name="reinforce_pp",
            function=_reinforce_pp,
            per="batch",
            needs=(*_TOKENS, "is_trained"),
            options={"gamma": 1.0, "observations": "carry"},
            has_group_baseline=False,
        ),
        Advantage(
            name="reinforce_pp_baseline",
            function=_reinforce_pp_baseline,
            per="batch",
            needs=(*_BATCH, "is_trained"),
        ),
        Advantage(
            name="gae",
            function=_gae,
            per="batch",
            needs=("token_rewards", "values", "sequence", "is_truncated", "final_values", "positions", "is_trained"),
            options={"gamma": 1.0, "lam": 1.0, "truncated": "end", "observations": "carry"},
            has_group_baseline=False,
        ),
        Advantage(name="none", function=_none, per="batch", needs=("sequence",), has_group_baseline=False),
    )
}
