"""The advantages that a run file can name (algorithm.advantage). Name a custom one as "package.module:Class"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Advantage, Floats
from asyncrl.policies.advantages.groups import GPG, GRPO, OPO, RLOO, AsymRE, DrGRPO, MaxRL, OPMDAdvantage
from asyncrl.policies.advantages.returns import GAE, ReinforcePP, ReinforcePPBaseline, Returns
from asyncrl.policies.advantages.turns import TurnGRPO


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAdvantage(Advantage):
    """0 for every token, for losses that have their own signal."""

    name = "none"
    has_group_baseline = False

    def formula(self, sequence: NDArray[np.int64]) -> Floats:
        return np.zeros(len(sequence))


ADVANTAGES: dict[str, type[Advantage]] = {
    advantage.name: advantage
    for advantage in (
        GRPO,
        DrGRPO,
        RLOO,
        MaxRL,
        OPO,
        GPG,
        OPMDAdvantage,
        AsymRE,
        Returns,
        ReinforcePP,
        ReinforcePPBaseline,
        GAE,
        TurnGRPO,
        NoAdvantage,
    )
}
