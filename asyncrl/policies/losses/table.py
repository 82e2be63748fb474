"""The losses that a run file can name (algorithm.loss). Name a custom one as "package.module:Class"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrl.policies.losses.centered import ScoreCentered
from asyncrl.policies.losses.cispo import Cispo
from asyncrl.policies.losses.distillation import OPD, Distill, OPDReward
from asyncrl.policies.losses.dppo import DPPO
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ppo import GSPO, CoupledPPO, DecoupledPPO, PPOClip
from asyncrl.policies.losses.reinforce import SFT, Reinforce

CORE: Final[tuple[type[Loss], ...]] = (
    Reinforce,
    PPOClip,
    DecoupledPPO,
    CoupledPPO,
    GSPO,
    Cispo,
    DPPO,
    OPDReward,
    OPD,
    Distill,
    ScoreCentered,
    SFT,
)

LOSSES: Final[Mapping[str, type[Loss] | str]] = {loss.name: loss for loss in CORE} | {
    "gmpo": "asyncrl.contrib.losses.gmpo:GMPO",
    "aipo": "asyncrl.contrib.losses.aipo:AIPO",
    "topr": "asyncrl.contrib.losses.topr:TOPR",
    "topr_by_reward": "asyncrl.contrib.losses.topr:TOPRByReward",
    "sapo": "asyncrl.contrib.losses.sapo:SAPO",
    "aspo": "asyncrl.contrib.losses.aspo:ASPO",
    "prime_rl": "asyncrl.contrib.losses.prime_rl:PrimeRL",
    "m2po": "asyncrl.contrib.losses.m2po:M2PO",
    "p3o": "asyncrl.contrib.losses.p3o:P3O",
    "opmd": "asyncrl.contrib.losses.opmd:OPMD",
    "opmd_simple": "asyncrl.contrib.losses.opmd:SimpleOPMD",
    "vespo": "asyncrl.contrib.losses.vespo:VESPO",
}
"""Classes of the core, and addresses of the losses of single papers."""
