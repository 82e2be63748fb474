"""The losses that a run file can name (algorithm.loss). Name a custom one as "package.module:Class"."""

from __future__ import annotations

from asyncrl.policies.losses.aspo import ASPO
from asyncrl.policies.losses.cispo import AIPO, Cispo
from asyncrl.policies.losses.distillation import OPD, OPDReward
from asyncrl.policies.losses.dppo import DPPO, PrimeRL
from asyncrl.policies.losses.gmpo import GMPO
from asyncrl.policies.losses.gspo import GSPO
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.m2po import M2PO
from asyncrl.policies.losses.opmd import OPMD, SimpleOPMD
from asyncrl.policies.losses.p3o import P3O
from asyncrl.policies.losses.ppo import CoupledPPO, DecoupledPPO, PPOClip
from asyncrl.policies.losses.reinforce import SFT, Reinforce
from asyncrl.policies.losses.sapo import SAPO
from asyncrl.policies.losses.topr import TOPR, TOPRByReward
from asyncrl.policies.losses.vespo import VESPO

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (
        Reinforce,
        PPOClip,
        DecoupledPPO,
        CoupledPPO,
        GSPO,
        GMPO,
        Cispo,
        AIPO,
        TOPR,
        TOPRByReward,
        SAPO,
        ASPO,
        DPPO,
        PrimeRL,
        M2PO,
        P3O,
        OPMD,
        SimpleOPMD,
        VESPO,
        OPDReward,
        OPD,
        SFT,
    )
}
