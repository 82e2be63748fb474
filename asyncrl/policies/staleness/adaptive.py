"""Controllers that answer the effective sample size (ESS) of the off-policy weights: it falls before the reward does.

Both take the ESS of the untruncated sequence ratios as a fraction of the sequences (offpolicy/sequence_ess).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from asyncrl.config.staleness import StalenessSection


def vcpo_learning_rate(
    learning_rate: float, *, ess_fraction: float, base_ess_fraction: float = 1.0, rule: str = "sqrt"
) -> float:
    """The learning rate of a step whose batch is worth ``ess_fraction`` of its sequences, in (0, learning_rate].

    learning_rate x min(1, ess / base), under a root with rule "sqrt" as noise scales for Adam, as it is with "linear".
    It holds for this step alone. Source: VCPO, arXiv:2602.17616, base 1 and unclipped sequence weights. Raises KeyError
    for another rule.
    """
    share = min(1.0, ess_fraction / base_ess_fraction)
    return float(learning_rate * share ** {"sqrt": 0.5, "linear": 1.0}[rule])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBound:
    """A bound on staleness that follows the ESS: additive increase, multiplicative decrease. Ours.

    It is the bound of admission: from the next step on the window is (bound + 1) batches. Eviction stays at
    ``largest``, the run file's max_staleness, which no trained token is ever over. So a bound that falls drops nothing:
    what was generated under the old one is paid for, within the guarantee, and trained oldest first, while nothing is
    published until the narrower window has room. A straggler may be older than ``bound``, never than ``largest``.

    bound             what admission allows now, in [smallest, largest]
    low, high         ESS fractions: below ``low`` the bound is halved at once; ``patience`` steps in a row above
                      ``high`` raise it by one
    calm              steps in a row above ``high`` so far
    hold              steps for which the ESS is not looked at, after a halving: so long do batches of the old bound
                      still come
    """

    bound: int
    largest: int
    smallest: int = 1
    low: float = 0.5
    high: float = 0.9
    patience: int = 4
    calm: int = 0
    hold: int = 0

    @classmethod
    def fixed(cls, bound: int) -> AdaptiveBound:
        """One that stays where it is."""
        return cls(bound=bound, largest=bound, smallest=bound)

    @classmethod
    def of(cls, section: StalenessSection, *, largest: int) -> AdaptiveBound:
        """What the run file's [staleness] says, before any step: ``largest``, and fixed there unless it is adaptive."""
        if not section.adaptive:
            return cls.fixed(largest)
        low, high = section.ess_low, section.ess_high
        return cls(
            bound=largest, largest=largest, smallest=section.smallest, low=low, high=high, patience=section.patience
        )

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; the rest is the run file's."""
        return {"bound": self.bound, "calm": self.calm, "hold": self.hold}

    def resumed(self, state: Mapping[str, int]) -> AdaptiveBound:
        """Where a checkpoint left off, within the limits of now; an empty ``state`` changes nothing."""
        found = replace(self, **state)
        return replace(found, bound=min(self.largest, max(self.smallest, found.bound)))

    def update(self, ess: float) -> AdaptiveBound:
        """The bound after a step whose batch had this ESS fraction; nan, of a batch without tokens, is no calm step."""
        if self.hold:
            return replace(self, hold=self.hold - 1)
        if ess < self.low:
            return replace(self, bound=max(self.smallest, self.bound // 2), calm=0, hold=self.bound)
        calm = self.calm + 1 if ess > self.high else 0
        if calm < self.patience:
            return replace(self, calm=calm)
        return replace(self, bound=min(self.largest, self.bound + 1), calm=0)
