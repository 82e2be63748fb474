"""What an algorithm is put together from: the tables of advantages, losses and aggregations, each a row per formula.

A row names its pure function, what of the batch and of other models it needs, and the defaults of its options; it says
what it must not be combined with. To add one: a function in advantages.py, returns.py or losses/, and a row here
(docs/algorithms.md, tests/test_algorithms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies import advantages, aggregation, distillation, losses, returns
from asyncrl.policies.segments import Array

Options = Mapping[str, Any]
Floats = NDArray[np.float64]

SCORED_BY: Mapping[str, str] = {
    "values": "critic",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "prox_logprobs": "policy",
}
"""Which model says it of every token, before the step (protocols.Backend.score)."""

OF_BATCH = ("effective_fraction", "keep")
"""What a loss may need that is decided over the whole batch, from the policy's logprobs of it (scored.py)."""


# -- advantages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """A batch as advantages see it: B trajectories, M response tokens end to end.

    rewards  f64[B];  group  i64[B]: which prompt group;  sequence  i64[M]: which trajectory a token belongs to, rising
    is_truncated  bool[B]: cut at the longest allowed answer
    kl            f64[M]: taken off each token's reward

    Where there is a critic, in the present weights:
    values        f64[M]: of the state in which each token was chosen;  final_values  f64[B]: behind the last one
    """

    rewards: NDArray[np.float64]
    group: NDArray[np.int64]
    sequence: NDArray[np.int64]
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
    options: Options = field(default_factory=dict)
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


def _reinforce_pp(token_rewards: Floats, sequence: NDArray[np.int64], *, gamma: float) -> Floats:
    return returns.whiten(returns.reinforce(token_rewards, sequence, gamma=gamma))


def _gae(
    token_rewards: Floats,
    values: Floats,
    sequence: NDArray[np.int64],
    is_truncated: NDArray[np.bool_],
    final_values: Floats,
    *,
    gamma: float,
    lam: float,
    truncated: Literal["end", "bootstrap"],
) -> tuple[Floats, Floats]:
    """Advantages whitened over the batch as in verl and OpenRLHF, returns as they are."""
    bootstrap = np.where(is_truncated, final_values, 0.0) if truncated == "bootstrap" else None
    estimates, targets = returns.gae(token_rewards, values, sequence, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return returns.whiten(estimates), targets


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
    alpha = advantages.gpg_alpha(rewards, group, count=count)
    values = np.zeros(len(rewards))
    for name in np.unique(group):
        values[group == name] = advantages.gpg(rewards[group == name], alpha=alpha, f_norm=f_norm)
    return values[sequence]


_TOKENS = ("token_rewards", "sequence")

ADVANTAGES: dict[str, Advantage] = {
    row.name: row
    for row in (
        Advantage(name="grpo", function=advantages.grpo, options={"eps": 1e-6}),
        Advantage(name="dr_grpo", function=advantages.dr_grpo),
        Advantage(name="rloo", function=advantages.rloo),
        Advantage(name="maxrl", function=advantages.maxrl, options={"eps": 0.0}),
        Advantage(name="opo", function=advantages.opo, needs=("rewards", "lengths")),
        Advantage(
            name="gpg",
            function=_gpg,
            per="batch",
            needs=("rewards", "group", "sequence"),
            options={"f_norm": 1.0, "count": "nonzero_rewards"},
        ),
        Advantage(
            name="reinforce",
            function=returns.reinforce,
            per="batch",
            needs=_TOKENS,
            options={"gamma": 1.0},
            has_group_baseline=False,
        ),
        Advantage(
            name="reinforce_pp",
            function=_reinforce_pp,
            per="batch",
            needs=_TOKENS,
            options={"gamma": 1.0},
            has_group_baseline=False,
        ),
        Advantage(
            name="reinforce_pp_baseline",
            function=returns.reinforce_pp_baseline,
            per="batch",
            needs=("rewards", "group", "sequence"),
        ),
        Advantage(
            name="gae",
            function=_gae,
            per="batch",
            needs=("token_rewards", "values", "sequence", "is_truncated", "final_values"),
            options={"gamma": 1.0, "lam": 1.0, "truncated": "end"},
            has_group_baseline=False,
        ),
        Advantage(name="none", function=_none, per="batch", needs=("sequence",), has_group_baseline=False),
    )
}


# -- losses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """takes: positional arguments of the function, by name; needs: keyword arguments besides its options.

    is_coupled     it weights or bounds pi / behavior itself: a correction's weight on top would count that ratio twice
    is_supervised  the data need not be the policy's: staleness does not matter
    """

    name: str
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    is_coupled: bool = False
    is_supervised: bool = False

    def __call__(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss f32[M] and clipped bool[M] of response tokens, from what ``values`` holds by name."""
        needed = {name: values[name] for name in self.needs}
        return self.function(*(values[name] for name in self.takes), **needed, **self.options)


def _m2po(
    logprobs: Array, prox_logprobs: Array, advantage: Array, *, keep: Array, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``threshold`` has made ``keep`` of the whole batch (scored.py)."""
    return losses.m2po(logprobs, prox_logprobs, advantage, keep=keep)


def _opd_reward(
    logprobs: Array, prox_logprobs: Array, advantage: Array, teacher_logprobs: Array, *, coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's part joins the advantages here, where the policy's logprobs are at hand without another pass."""
    mixed = distillation.opd_advantages(advantage, prox_logprobs, teacher_logprobs, coef=coef)
    return losses.reinforce(logprobs, mixed)


_PROX = ("logprobs", "prox_logprobs", "advantages")
_BEHAVIOR = ("logprobs", "behavior_logprobs", "advantages")
_SEQUENCE = ("sequence", "num_sequences")

LOSSES: dict[str, Loss] = {
    row.name: row
    for row in (
        Loss(name="reinforce", function=losses.reinforce, takes=("logprobs", "advantages")),
        Loss(name="ppo_clip", function=losses.ppo_clip, takes=_PROX, options={"clip_low": 0.2, "clip_high": 0.2}),
        Loss(
            name="coupled_ppo",
            function=losses.coupled_ppo,
            takes=_BEHAVIOR,
            options={"clip_low": 0.2, "clip_high": 0.2},
            is_coupled=True,
        ),
        Loss(
            name="gspo",
            function=losses.gspo,
            takes=_PROX,
            needs=_SEQUENCE,
            options={"clip_low": 3e-4, "clip_high": 4e-4},
        ),
        Loss(
            name="cispo",
            function=losses.cispo,
            takes=_BEHAVIOR,
            options={"cap_mode": "one_plus", "clip_low": 1.0, "clip_high": 4.0},
            is_coupled=True,
        ),
        Loss(
            name="topr",
            function=losses.topr,
            takes=_BEHAVIOR,
            needs=_SEQUENCE,
            options={"level": "sequence"},
            is_coupled=True,
        ),
        Loss(
            name="sapo",
            function=losses.sapo,
            takes=_PROX,
            options={"tau_positive": 1.0, "tau_negative": 1.05},
        ),
        Loss(
            name="aspo",
            function=losses.aspo,
            takes=_BEHAVIOR,
            options={"clip_low": 0.2, "clip_high": 0.2, "cap_positive": 3.0, "cap_negative": 3.0},
            is_coupled=True,
        ),
        Loss(
            name="dppo",
            function=losses.dppo,
            takes=_BEHAVIOR,
            options={"divergence": "tv", "delta_low": 0.2, "delta_high": 0.2, "ratio_cap": 20.0},
            is_coupled=True,
        ),
        Loss(name="m2po", function=_m2po, takes=_PROX, needs=("keep",), options={"threshold": 0.04}),
        Loss(name="p3o", function=losses.p3o, takes=_BEHAVIOR, needs=("effective_fraction",), is_coupled=True),
        Loss(name="opd_reward", function=_opd_reward, takes=(*_PROX, "teacher_logprobs"), options={"coef": 1.0}),
        Loss(
            name="opd",
            function=distillation.opd,
            takes=("logprobs", "behavior_logprobs", "teacher_logprobs"),
            options={"max_drop": 0.2, "kl_coef": 1e-3},
            is_coupled=True,
        ),
        Loss(name="sft", function=losses.sft, takes=("logprobs",), is_supervised=True),
    )
}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "cap_mode": ("one_plus", "absolute"),
    "count": ("nonzero_rewards", "groups_with_variance"),
    "truncated": ("end", "bootstrap"),
    "level": ("sequence", "token"),
    "divergence": ("tv", "kl"),
}
"""What the options that are words may be."""


# -- aggregations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """needs: "group" i64[B] where prompts count alike."""

    name: str
    function: Callable[..., list[NDArray[Any]]]
    needs: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)

    def at_most(self, max_response_tokens: int, *, unless: Options) -> Aggregation:
        """With the run's longest response as the constant, where there is one and ``unless`` does not set it."""
        name = "max_response_tokens"
        if name not in self.options or any(key.rpartition(".")[2] == name for key in unless):
            return self
        return replace(self, options={**self.options, name: float(max_response_tokens)})

    def __call__(self, masks: Sequence[NDArray[np.bool_]], *, group: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """The weight of each response token in the batch's loss.  [B] bool[T] -> [B] f32[T]"""
        needed = {"group": group} if "group" in self.needs else {}
        return self.function(masks, **needed, **self.options)


AGGREGATIONS: dict[str, Aggregation] = {
    row.name: row
    for row in (
        Aggregation(name="token_mean", function=aggregation.token_mean),
        Aggregation(name="token_sum", function=aggregation.token_sum),
        Aggregation(name="seq_mean_token_mean", function=aggregation.seq_mean_token_mean),
        Aggregation(name="seq_mean_token_sum", function=aggregation.seq_mean_token_sum),
        Aggregation(
            name="seq_mean_token_sum_norm",
            function=aggregation.seq_mean_token_sum_norm,
            options={"max_response_tokens": 1024.0},
        ),
        Aggregation(name="prompt_mean", function=aggregation.prompt_mean, needs=("group",)),
    )
}
