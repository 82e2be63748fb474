"""Base of the advantages: rewards of a batch to one number per response token. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.parts import Part

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """A batch as advantages see it: B answers, M response tokens end to end.

    rewards  f64[B];  group  i64[B]: which prompt group;  sequence  i64[M]: which answer a token belongs to, rising
    is_trained    bool[M]: what moments over the batch are taken of; a truncated answer may be masked. None: all are
    positions     i64[M]: the token's place in its response; a gap is an observation
    is_truncated  bool[B]: cut at the longest allowed answer
    kl            f64[M]: subtracted from each token's reward

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
    values: Floats | None = None
    final_values: Floats | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens of each answer.  i64[B]"""
        return np.bincount(self.sequence, minlength=len(self.rewards))

    @property
    def token_rewards(self) -> Floats:
        """The answer's reward on its last token, minus ``kl`` on every token.  f64[M]

        An answer without tokens has nowhere to put its reward and is left out.
        """
        result = np.zeros(len(self.sequence)) if self.kl is None else -self.kl
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
    """``formula`` takes rewards and group, of the batch's B answers, and returns f64[B]: one number per answer.

    Every member of a group counts in its statistics, also one that a correction rejects later.
    """

    def with_returns(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        values = self.formula(**{name: getattr(batch, name) for name in self.inputs})
        return values.astype(np.float32)[batch.sequence], None


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
