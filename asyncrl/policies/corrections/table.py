"""The corrections that a run file can name (algorithm.correction). Name a custom one as "package.module:Class"."""

from __future__ import annotations

from asyncrl.policies.corrections.correction import Correction
from asyncrl.policies.corrections.masks import OPSM, GeoMask, KStat, OutlierMask, SequenceMask, TokenMask, Veto
from asyncrl.policies.corrections.weights import (
    Clamp,
    IcePop,
    MISSequence,
    MISToken,
    NoCorrection,
    SelfNorm,
    TISGeometric,
    TISPrefix,
    TISSequence,
    TISToken,
)

CORRECTIONS: dict[str, type[Correction]] = {
    correction.name: correction
    for correction in (
        NoCorrection,
        TISToken,
        Clamp,
        TISSequence,
        TISGeometric,
        TISPrefix,
        MISToken,
        MISSequence,
        IcePop,
        TokenMask,
        SequenceMask,
        GeoMask,
        Veto,
        OutlierMask,
        OPSM,
        KStat,
        SelfNorm,
    )
}
