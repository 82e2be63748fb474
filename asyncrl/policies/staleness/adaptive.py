"""Controllers that react to the effective sample size (ESS) of the off-policy weights, which falls before the reward.

Both take the ESS of the untruncated sequence ratios, as a fraction of the sequences (offpolicy/sequence_ess).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from asyncrl.config.staleness import StalenessSection


def vcpo_learning_rate(
    learning_rate: float, *, ess_fraction: float, base_ess_fraction: float = 1.0, rule: str = "sqrt"
) -> float:
    """Return the learning rate of a step whose batch has this ESS fraction, in (0, learning_rate].

    The result is learning_rate x share or, with rule "sqrt", learning_rate x sqrt(share), as noise scales for Adam;
    share = min(1, ess / base). It applies to this step only. Raises KeyError for any rule but "sqrt" and "linear".
    Source: VCPO, arXiv:2602.17616, with base 1 and unclipped sequence weights.
    """
    share = min(1.0, ess_fraction / base_ess_fraction)
    return float(learning_rate * share ** {"sqrt": 0.5, "linear": 1.0}[rule])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBound:
    """A bound on staleness that follows the ESS: additive increase, multiplicative decrease. Our own method.

    Only admission uses ``bound``: from the next step on, the window is (bound + 1) batches. Eviction keeps using
    ``largest``, the run file's max_staleness, and no trained token is ever older than that. A falling bound therefore
    drops nothing. Groups generated under the old bound are already paid for and within the guarantee, so they are
    trained, oldest first; nothing is published until the narrower window has room. A straggler may be older than
    ``bound``, but never older than ``largest``.

    bound      what admission allows now, in [smallest, largest]
    low, high  ESS fractions: an ESS below ``low`` halves the bound at once; ``patience`` consecutive steps above
               ``high`` raise the bound by one
    calm       consecutive steps above ``high`` so far
    hold       steps for which the ESS is still ignored after a halving, because batches of the old bound keep arriving
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
        """Return a bound that never changes."""
        return cls(bound=bound, largest=bound, smallest=bound)

    @classmethod
    def of(cls, section: StalenessSection, *, largest: int) -> AdaptiveBound:
        """Return the bound before the first step: ``largest``, and fixed there unless [staleness] says adaptive."""
        if not section.adaptive:
            return cls.fixed(largest)
        low, high = section.ess_low, section.ess_high
        return cls(
            bound=largest, largest=largest, smallest=section.smallest, low=low, high=high, patience=section.patience
        )

    def state(self) -> dict[str, int]:
        """Return the part that a checkpoint keeps; the rest comes from the run file."""
        return {"bound": self.bound, "calm": self.calm, "hold": self.hold}

    def resumed(self, state: Mapping[str, int]) -> AdaptiveBound:
        """Return the bound of a checkpoint, clipped to the current limits; an empty ``state`` changes nothing."""
        found = replace(self, **state)
        return replace(found, bound=min(self.largest, max(self.smallest, found.bound)))

    def update(self, ess: float) -> AdaptiveBound:
        """Return the bound after a step with this ESS fraction; nan (a batch without tokens) resets ``calm``."""
        if self.hold:
            return replace(self, hold=self.hold - 1)
        if ess < self.low:
            return replace(self, bound=max(self.smallest, self.bound // 2), calm=0, hold=self.bound)
        calm = self.calm + 1 if ess > self.high else 0
        if calm < self.patience:
            return replace(self, calm=calm)
        return replace(self, bound=min(self.largest, self.bound + 1), calm=0)
