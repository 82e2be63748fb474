"""Advantages that differ between the turns of a rollout, from the rewards of turns (Trajectory.turn_rewards)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import TurnReward
from asyncrl.policies.advantages.advantage import Advantage, Floats
from asyncrl.policies.advantages.groups import GRPO
from asyncrl.policies.component import NonNegative, Positive, Share

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGRPO(Advantage):
    """``grpo`` of the rollout rewards, plus ``turn_weight`` x ``grpo`` of the discounted turn rewards from a turn on.

    A turn is compared with the turn of the same number in the other rollouts of its group, as in MT-GRPO
    (arXiv:2505.11821). The parts of a rollout form one sequence of turns. This is GiGPO's step advantage, except that
    GiGPO compares steps where the environment's state repeats. Without turn rewards the result is ``grpo``.
    """

    name = "turn_grpo"
    paper = "GiGPO, arXiv:2505.10978"

    eps: Positive = 1e-6
    gamma: Share = 1.0
    turn_weight: NonNegative = 1.0

    def formula(
        self,
        rewards: Floats,
        group: Ints,
        rollout: Ints | None,
        sequence: Ints,
        turn: Ints | None,
        turn_rewards: Floats | None,
    ) -> Floats:
        names = np.arange(len(rewards)) if rollout is None else rollout
        _, first, member = np.unique(names, return_index=True, return_inverse=True)
        grpo, groups, owner = GRPO(eps=self.eps), group[first], member[sequence]
        of_rollouts: Floats = grpo.formula(rewards[first], groups)
        if turn is None or turn_rewards is None or not len(turn):
            return of_rollouts[owner]
        shape = (len(first), int(turn.max()) + 1)
        returns, is_there = np.zeros(shape), np.zeros(shape, np.bool_)
        np.add.at(returns, (owner, turn), turn_rewards)
        is_there[owner, turn] = True
        for number in range(shape[1] - 1, 0, -1):
            returns[:, number - 1] += self.gamma * returns[:, number]
        of_turns = np.zeros(shape)
        for number in range(shape[1]):
            who = is_there[:, number]
            of_turns[who, number] = grpo.formula(returns[who, number], groups[who])
        return of_rollouts[owner] + self.turn_weight * of_turns[owner, turn]


def turns_of(mask: NDArray[np.bool_], rewards: Sequence[TurnReward]) -> tuple[Ints, Floats]:
    """Return the turn number (from 0) and the reward of each token under the mask.  bool[T] -> i64[M], f64[M]

    A turn ends at an observation, and before the start of a turn that has a reward. The reward is on the turn's last
    token.
    """
    places = np.flatnonzero(mask)
    begins = np.isin(places, [one.start for one in rewards])
    begins[1:] |= np.diff(places) != 1
    begins[:1] = False
    turn: Ints = np.cumsum(begins, dtype=np.int64)
    earned = np.zeros(len(places))
    for one in rewards:
        number = turn[np.searchsorted(places, one.start)]
        earned[np.searchsorted(turn, number, side="right") - 1] += one.reward
    return turn, earned
