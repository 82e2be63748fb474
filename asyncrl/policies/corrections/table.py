"""The corrections that a run file can name (algorithm.correction). Name a custom one as "package.module:Class"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrl.policies.corrections.correction import Correction
from asyncrl.policies.corrections.masks import GeoMask, SequenceMask, TokenMask, Veto
from asyncrl.policies.corrections.weights import (
    IcePop,
    MISSequence,
    MISToken,
    NoCorrection,
    SelfNorm,
    TISGeometric,
    TISSequence,
    TISToken,
)

CORE: Final[tuple[type[Correction], ...]] = (
    NoCorrection,
    TISToken,
    TISSequence,
    TISGeometric,
    MISToken,
    MISSequence,
    IcePop,
    TokenMask,
    SequenceMask,
    GeoMask,
    Veto,
    SelfNorm,
)

CORRECTIONS: Final[Mapping[str, type[Correction] | str]] = {correction.name: correction for correction in CORE} | {
    "clamp": "asyncrl.contrib.losses.corrections:Clamp",
    "tis_prefix": "asyncrl.contrib.losses.corrections:TISPrefix",
    "outlier_mask": "asyncrl.contrib.losses.corrections:OutlierMask",
    "opsm": "asyncrl.contrib.losses.corrections:OPSM",
    "binary_kl": "asyncrl.contrib.losses.corrections:BinaryKL",
    "k_stat": "asyncrl.contrib.losses.corrections:KStat",
}
"""Classes of the core, and addresses of the corrections of single papers and frameworks."""
