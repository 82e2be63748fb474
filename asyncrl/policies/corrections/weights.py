"""Corrections that weight tokens by importance ratios: truncated, clamped or masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import Cap, Floor
from asyncrl.policies.corrections.correction import Bounded, Correction, geometric_ratio, ratio, sequence_ratio
from asyncrl.policies.losses.segments import Array, as_floats, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCorrection(Correction):
    """Weight 1 for every token: stale data is trained as if it were fresh."""

    name = "none"

    def formula(self, log_ratio: Array) -> torch.Tensor:
        return torch.ones_like(as_floats(log_ratio)).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class TISToken(Correction):
    """Truncated importance sampling per token: min(ratio, cap).

    The cap of 2.0 is that of slime, verl, SkyRL and open-instruct. ROLL's TIS has cap 1, OpenRLHF's clamps both sides
    (``clamp``). cap = inf is plain importance sampling.
    """

    name = "tis_token"
    paper = "fengyao.notion.site/off-policy-rl (2025); truncation arXiv:1802.01561"

    cap: Cap = 2.0

    def formula(self, log_ratio: Array) -> torch.Tensor:
        return ratio(log_ratio).clamp(max=self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class TISSequence(Correction):
    """min(product of the sequence's ratios, cap), on each token of the sequence.

    The only weight whose bias vanishes as the cap grows, but its variance grows with length. Caps in use: 2 (verl),
    5 (SkyRL), 8 (VCPO, arXiv:2602.17616).
    """

    name = "tis_sequence"
    level = "sequence"

    cap: Cap = 2.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        weights = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).clamp(max=self.cap)
        return spread(weights, sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class TISGeometric(Bounded):
    """Geometric mean of the sequence's ratios, clamped, on each token of the sequence.

    AReaL (level = sequence, upper 5) and open-instruct (upper 2) use this weight.
    """

    name = "tis_geometric"
    level = "sequence"

    low: Floor = 0.0
    high: Cap = 2.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        ratios = geometric_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
        return spread(ratios.clamp(min=self.low, max=self.high), sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class MISToken(Bounded):
    """Masked importance sampling: the token's ratio if low <= ratio <= high, else 0.

    The bounds are those of TRL's token_mask; slime's helper uses 0.5 (or 1 / high) and 2.
    """

    name = "mis_token"

    low: Floor = 0.0
    high: Cap = 3.0

    def formula(self, log_ratio: Array) -> torch.Tensor:
        ratios = ratio(log_ratio)
        return ratios.where(self.is_inside(ratios), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MISSequence(Bounded):
    """The product of the sequence's ratios if it is within the bounds, else 0. TRL's default: sequence_mask, 3.0."""

    name = "mis_sequence"
    level = "sequence"

    low: Floor = 0.0
    high: Cap = 3.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        ratios = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
        return spread(ratios.where(self.is_inside(ratios), 0.0), sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop(MISToken):
    """The token's ratio if low <= ratio <= high, else 0: ``mis_token`` with both bounds.

    alpha 0.5 and beta 5 as in NeMo-RL, verl and OpenRLHF; slime uses 0.5 and 2. Made for mixtures of experts, where
    the engine routes some tokens to other experts.
    """

    name = "icepop"
    paper = "Ring-1T, arXiv:2510.18855"

    low: Floor = 0.5
    high: Cap = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfNorm(Correction):
    """weights / mean_weight, so that the mean weight of the batch becomes 1.

    The mean is over all tokens or sequences of the batch (``diagnostics.mean_weight`` of the all-reduced sums). With a
    mean per micro-batch, the gradient would depend on the split. Self-normalization restores the gradient's size after
    truncation, but not its direction, which stays biased. It is verl's rollout_is_batch_normalize, after truncation.
    """

    name = "self_norm"
    kind = "norm"

    def formula(self, weights: Array, mean_weight: float | torch.Tensor) -> torch.Tensor:
        return as_floats(weights).detach() / mean_weight
