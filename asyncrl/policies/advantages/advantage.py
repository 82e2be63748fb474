"""Base classes of advantages: from the rewards of a batch to one number per response token. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.component import Component

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The inputs of an advantage: B sequences with M response tokens in total, concatenated.

    rewards       f64[B]: reward of the sequence's rollout
    group         i64[B]: prompt group of the sequence
    sequence      i64[M]: sequence that a token belongs to, non-decreasing
    rollout       i64[B]: rollout that a sequence is a part of, non-decreasing; None if each sequence is a rollout
    is_trained    bool[M]: tokens that batch statistics are computed over; excludes masked tokens, such as those of
                  truncated answers. None: all tokens
    positions     i64[M]: position of the token in its response; a gap is an observation
    is_truncated  bool[B]: cut at the length limit; False for every sequence but the last of a rollout
    kl            f64[M]: subtracted from the reward of each token
    turn_rewards  f64[M]: reward of each turn, on the last token of the turn; None if no turn has one
    turn          i64[M]: turn of the rollout that a token belongs to, from 0

    With a critic, both from its current weights:
    values        f64[M]: value of the state in which each token was chosen
    final_values  f64[B]: value of the state after the last token
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
        """Number of response tokens of each sequence.  i64[B]"""
        return np.bincount(self.sequence, minlength=len(self.rewards))

    @property
    def token_rewards(self) -> Floats:
        """Reward of each token: -``kl`` + ``turn_rewards``, plus the rollout's reward on the last token.  f64[M]

        The last token of every part gets the whole reward, because each part leads to it and the next part does not
        continue the tokens of this one. A sequence without tokens cannot carry its reward and is left out.
        """
        result = np.zeros(len(self.sequence)) if self.kl is None else -self.kl
        if self.turn_rewards is not None:
            result = result + self.turn_rewards
        last = np.append(self.sequence[1:] != self.sequence[:-1], True)[: len(self.sequence)]
        result[last] += self.rewards[self.sequence[last]]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Component):
    """Base of all advantages.

    ``formula`` takes fields of AdvantageInputs and returns the advantages, f64[M]. With ``learns_values`` it returns
    two arrays: the advantages, and the returns that a critic learns.
    """

    has_group_baseline: ClassVar[bool] = True
    """Whether rollouts are compared within their group. A group of one has nothing to compare with."""
    learns_values: ClassVar[bool] = False

    @property
    def is_whitened(self) -> bool:
        """Whether the formula whitens its result itself."""
        return False

    def __call__(self, batch: AdvantageInputs) -> NDArray[np.float32]:
        """Return the advantage of each response token.  f32[M]"""
        return self.with_returns(batch)[0]

    def with_returns(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the advantage of each response token, and its return if ``learns_values``, else None.  f32[M] each"""
        made = self.formula(**{name: getattr(batch, name) for name in self.inputs})
        if not self.learns_values:
            return made.astype(np.float32), None
        return made[0].astype(np.float32), made[1].astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage(Advantage):
    """Base of advantages with one value per rollout, shared by all tokens of all its parts.

    ``formula`` takes the rewards and groups of the batch's R rollouts and returns f64[R]. All members of a group enter
    its statistics, including those that a correction rejects later.
    """

    def with_returns(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        whole, of_sequence = by_rollout(batch)
        values = self.formula(**{name: whole[name] if name in whole else getattr(batch, name) for name in self.inputs})
        return values.astype(np.float32)[of_sequence[batch.sequence]], None


def by_rollout(batch: AdvantageInputs) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Return rewards, group and lengths of the R rollouts, [R] each, and the rollout index of each sequence, i64[B]."""
    if batch.rollout is None:
        of_sequence = first = np.arange(len(batch.rewards))
    else:
        _, first, of_sequence = np.unique(batch.rollout, return_index=True, return_inverse=True)
    lengths = np.bincount(of_sequence, weights=batch.lengths, minlength=len(first)).astype(np.int64)
    return {"rewards": batch.rewards[first], "group": batch.group[first], "lengths": lengths}, of_sequence


def of_each_group(function: Callable[..., Floats], group: NDArray[np.int64], *columns: Floats) -> Floats:
    """Apply ``function`` to each group's slice of the columns; keep the members' order.  i64[B], [B] each -> f64[B]"""
    values = np.zeros(len(group))
    for name in np.unique(group):
        member = group == name
        values[member] = function(*(column[member] for column in columns))
    return values


def centered(values: Floats) -> Floats:
    """Return values minus their mean; exactly 0 if all are equal, as rounding error / eps would look like a signal."""
    if len(values) == 0 or (values == values[0]).all():
        return np.zeros_like(values)
    difference: Floats = values - values.mean()
    return difference
