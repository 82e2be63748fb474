"""Corrections that reject tokens: 1 keeps a token, 0 drops it. They multiply any weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from asyncrl.config.checks import Range
from asyncrl.policies.component import FRESH, Cap, Floor
from asyncrl.policies.corrections.correction import Bounded, Correction, geometric_ratio, ratio, sequence_ratio
from asyncrl.policies.losses.segments import Array, segment_sum, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask(Bounded):
    """A mask that keeps tokens or sequences whose value is in [low, high]."""

    kind = "mask"

    def keeps(self, ratios: torch.Tensor) -> torch.Tensor:
        return self.is_inside(ratios).to(ratios.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask(Mask):
    """Keep tokens whose ratio is within the bounds: the mask of ``icepop`` without its weight.

    With the weight ``tis_token``, this is slime's helper with tis and rs of level "token".
    """

    name = "token_mask"

    low: Floor = 0.5
    high: Cap = 5.0

    def formula(self, log_ratio: Array) -> torch.Tensor:
        return self.keeps(ratio(log_ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMask(Mask):
    """Keep sequences whose product of ratios is within the bounds: the mask of ``mis_sequence`` without its weight.

    The bounds 0.5 and 2 are those of SkyRL's product mask.
    """

    name = "sequence_mask"

    low: Floor = 0.5
    high: Cap = 2.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        ratios = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
        return spread(self.keeps(ratios), sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoMask(Mask):
    """Keep sequences whose geometric mean ratio is within the bounds.

    The defaults 0.99 and 1.01 are SkyRL's; verl uses 0.999 and 1.001, NeMo-RL 0.999 and 1.002. The right values depend
    on response length and numerics.
    """

    name = "geo_mask"

    low: Floor = 0.99
    high: Cap = 1.01

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        ratios = geometric_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
        return spread(self.keeps(ratios), sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto(Correction):
    """Reject sequences with a token whose ratio is below the threshold. 1e-4 as in slime's helper; verl removed it."""

    name = "veto"
    kind = "mask"

    threshold: Annotated[float, Range(low=0.0, high=1.0, is_open=True, why=FRESH)] = 1e-4

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        return all_inside(ratio(log_ratio), self.threshold, math.inf, sequence, num_sequences)


def all_inside(ratios: torch.Tensor, low: float, high: float, sequence: Array, num_sequences: int) -> torch.Tensor:
    is_outlier = ((ratios < low) | (ratios > high)).to(ratios.dtype)
    outliers = segment_sum(is_outlier, sequence, num_sequences=num_sequences)
    return spread((outliers == 0).to(ratios.dtype), sequence)
