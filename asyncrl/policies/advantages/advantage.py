"""Base of the advantages: rewards of a batch to one number per response token. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.parts import Part

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """A batch as advantages see it: B sequences, M response tokens end to end.

    rewards  f64[B]: of its rollout;  group  i64[B]: which prompt group
    sequence  i64[M]: which sequence a token belongs to, rising
    rollout  i64[B]: which rollout a sequence is a part of, rising; None: each is one by itself
    is_trained    bool[M]: what moments over the batch are taken of; a truncated answer may be masked. None: all are
    positions     i64[M]: the token's place in its response; a gap is an observation
    is_truncated  bool[B]: cut at the longest allowed answer; False of a sequence that its rollout goes on behind
    kl            f64[M]: subtracted from each token's reward
    turn_rewards  f64[M]: what turns earned by themselves, each on its turn's last token; None: nothing
    turn          i64[M]: which turn of its rollout a token belongs to, from 0

    Where there is a critic, in the present weights:
    values        f64[M]: of the state in which each token was chosen;  final_values  f64[B]: behind the last one
    """

    rewards: Floats
    group: NDArray[np.int64]
    sequence: NDArray[np.int64]
    is_trained: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    is_truncated: NDArray[np.bool_] | None = None
    kl: Floats | None = None
    rollout: NDArray[np.int64] | None = None
    turn_rewards: Floats | None = None
    turn: NDArray[np.int64] | None = None
    values: Floats | None = None
    final_values: Floats | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens of each sequence.  i64[B]"""
        return np.bincount(self.sequence, minlength=len(self.rewards))

    @property
    def token_rewards(self) -> Floats:
        """The rollout's reward on the last token of each of its sequences, turn_rewards, minus ``kl``.  f64[M]

        Each part has the whole reward: a part leads to it, and what is behind a part is no continuation of its tokens.
        A sequence without tokens has nowhere to put its reward and is left out.
        """
        result = np.zeros(len(self.sequence)) if self.kl is None else -self.kl
        if self.turn_rewards is not None:
            result = result + self.turn_rewards
        last = np.append(self.sequence[1:] != self.sequence[:-1], True)[: len(self.sequence)]
        result[last] += self.rewards[self.sequence[last]]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Part):
    """``formula`` takes fields of AdvantageInputs and returns f64[M], or with ``learns_values`` two of them: the
    advantages, and the returns that a critic learns.
    """

    has_group_baseline: ClassVar[bool] = True
    """A group of one has nothing to compare with."""
    learns_values: ClassVar[bool] = False

    def __call__(self, batch: AdvantageInputs) -> NDArray[np.float32]:
        """Advantage of each response token.  f32[M]"""
        return self.with_returns(batch)[0]

    def with_returns(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Advantage of each response token, and its return where a critic learns that.  f32[M] each"""
        made = self.formula(**{name: getattr(batch, name) for name in self.inputs})
        if not self.learns_values:
            return made.astype(np.float32), None
        return made[0].astype(np.float32), made[1].astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage(Advantage):
    """``formula`` takes rewards and group, of the batch's R rollouts, and returns f64[R]: one number per rollout, which
    all tokens of all its parts have.

    Every member of a group counts in its statistics, also one that a correction rejects later.
    """

    def with_returns(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        whole, of_sequence = by_rollout(batch)
        values = self.formula(**{name: whole[name] if name in whole else getattr(batch, name) for name in self.inputs})
        return values.astype(np.float32)[of_sequence[batch.sequence]], None


def by_rollout(batch: AdvantageInputs) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """rewards, group and lengths of the R rollouts, [R] each; and which of them each sequence belongs to, i64[B]."""
    if batch.rollout is None:
        of_sequence = first = np.arange(len(batch.rewards))
    else:
        _, first, of_sequence = np.unique(batch.rollout, return_index=True, return_inverse=True)
    lengths = np.bincount(of_sequence, weights=batch.lengths, minlength=len(first)).astype(np.int64)
    return {"rewards": batch.rewards[first], "group": batch.group[first], "lengths": lengths}, of_sequence


def of_each_group(function: Callable[..., Floats], group: NDArray[np.int64], *columns: Floats) -> Floats:
    """``function`` of each group's part of the columns, in the places of its members.  i64[B], [B] each -> f64[B]"""
    values = np.zeros(len(group))
    for name in np.unique(group):
        member = group == name
        values[member] = function(*(column[member] for column in columns))
    return values


def centered(values: Floats) -> Floats:
    """values minus their mean; exactly 0 where all are equal, as rounding errors over eps would be a signal."""
    if len(values) == 0 or (values == values[0]).all():
        return np.zeros_like(values)
    difference: Floats = values - values.mean()
    return difference
