"""Converts oracle vectors of policy losses to calls and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from asyncrl.contrib.losses.aipo import AIPO
from asyncrl.contrib.losses.aspo import ASPO
from asyncrl.contrib.losses.gmpo import GMPO
from asyncrl.contrib.losses.m2po import M2PO
from asyncrl.contrib.losses.opmd import OPMD, SimpleOPMD
from asyncrl.contrib.losses.p3o import P3O
from asyncrl.contrib.losses.prime_rl import PrimeRL
from asyncrl.contrib.losses.sapo import SAPO
from asyncrl.contrib.losses.topr import TOPR, TOPRByReward
from asyncrl.contrib.losses.vespo import VESPO
from asyncrl.policies.corrections import chains, diagnostics
from asyncrl.policies.corrections.correction import Correction, CorrectionInputs, geometric_ratio, sequence_ratio
from asyncrl.policies.corrections.weights import IcePop, TISSequence, TISToken
from asyncrl.policies.losses import kl
from asyncrl.policies.losses.cispo import Cispo
from asyncrl.policies.losses.dppo import DPPO
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ppo import GSPO, CoupledPPO, PPOClip
from asyncrl.policies.losses.ratios import ratio
from asyncrl.policies.losses.reinforce import SFT, Reinforce
from tests.oracles.dense import Adapter, Dense, Inputs, Outputs, Params, compute, one_of, renamed

CLIP = {"clip_low": "eps_low", "clip_high": "eps_high"}
PROX = ("lp_old", "lp_prox")
BEHAVIOR = ("lp_mu", "lp_old", "lp_prox")


class Tokens(Dense):
    """The response tokens of a vector, ``logprobs`` with gradient."""

    def __init__(self, inputs: Inputs, *, name: str = "lp_theta") -> None:
        super().__init__(inputs, like=name)
        self.logprobs = self.live(name)

    @property
    def advantages(self) -> torch.Tensor:
        return self.flat("advantages", "adv", "seq_advantages")

    def apply(
        self, loss: Loss, *, anchor: tuple[str, ...] = PROX, advantages: torch.Tensor | None = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return loss and clipped, relative to the first of the names in ``anchor`` that the vector has."""
        given = {
            "logprobs": lambda: self.logprobs,
            "prox_logprobs": lambda: self.flat(*anchor),
            "behavior_logprobs": lambda: self.flat(*anchor),
            "advantages": lambda: self.advantages if advantages is None else advantages,
            "sequence": lambda: self.sequence,
            "num_sequences": lambda: self.num_sequences,
            **{name: functools.partial(lambda value: value, value) for name, value in more.items()},
        }
        made: tuple[torch.Tensor, torch.Tensor] = compute(loss, **given)
        return made

    def weights_of(self, loss: Loss, unit: torch.Tensor, *, anchor: tuple[str, ...], **more: Any) -> torch.Tensor:
        """Return w of a loss -w A logprob, computed as the gradient at advantages of 1 and -1.  -> f64[M]"""
        value, _ = self.apply(loss, anchor=anchor, advantages=unit, **more)
        (gradient,) = torch.autograd.grad(value.sum(), self.logprobs)
        return -gradient * unit

    def outputs(self, loss: torch.Tensor, clipped: torch.Tensor) -> Outputs:
        """Return a loss, its aggregations, its gradient and the clipped tokens under the names that vectors expect."""
        mean = self.total(loss)
        unreduced, of_mean = self.gradient(loss.sum(), self.logprobs), self.gradient(mean, self.logprobs)
        return {
            "loss_token": self.back(loss),
            "loss": (self.back(loss), mean),
            "token_mean": mean,
            "seq_mean_token_mean": self.total(loss, "seq_mean_token_mean"),
            "loss_sum": self.total(loss, "token_sum"),
            "grad": (unreduced, of_mean),
            "grad_unreduced": unreduced,
            "grad_token_mean": of_mean,
            "clipped": self.back(clipped),
            "keep": self.back((~clipped).double()),
            "clipfrac": self.total(clipped.double()),
        }


def ppo_clip(params: Params, inputs: Inputs, **defaults: float) -> Outputs:
    tokens = Tokens(inputs)
    loss = PPOClip(**(defaults | renamed(params, **CLIP, dual_clip="c")))
    anchor = tokens.flat(*PROX)
    return tokens.outputs(*tokens.apply(loss)) | {
        "ratio": tokens.back(ratio(tokens.logprobs, anchor)),
        "ppo_kl": tokens.total(kl.k1(anchor, tokens.logprobs.detach())),
    }


def ppo_dual_clip(params: Params, inputs: Inputs) -> Outputs:
    """Leaves out the clipped fraction, because verl counts the dual clip separately."""
    made = ppo_clip(params, inputs, dual_clip=3.0)
    del made["clipfrac"]
    return made


def gspo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    loss, clipped = tokens.apply(GSPO(**renamed(params, **CLIP)))
    mean = tokens.total(loss, "seq_mean_token_mean")
    log_ratio = (tokens.logprobs - tokens.flat(*PROX)).detach()
    return tokens.outputs(loss, clipped) | {
        "seq_ratio": geometric_ratio(log_ratio, **tokens.segments),
        "loss": mean,
        "grad": tokens.gradient(mean, tokens.logprobs),
    }


def gmpo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    component = GMPO(**renamed(params, **CLIP))
    loss, clipped = tokens.apply(component)
    mean = tokens.total(loss, "seq_mean_token_mean")
    signs = torch.where(tokens.advantages >= 0, 1.0, -1.0).double()
    signed, _ = tokens.apply(component, advantages=signs)
    first = [int((tokens.sequence == index).nonzero()[0]) for index in range(tokens.num_sequences)]
    return tokens.outputs(loss, clipped) | {
        "ratio": (-signed * signs)[first],
        "loss": mean,
        "grad": tokens.gradient(mean, tokens.logprobs),
    }


def cispo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    anchor = ("lp_old", "lp_prox", "lp_mu")
    if "epsilon_high" in params:  # the parameter has TRL's name, and TRL's cap is absolute
        component = Cispo(cap_mode="absolute", clip_high=params["epsilon_high"])
    else:
        component = Cispo(**renamed(params, **CLIP))
    made = tokens.outputs(*tokens.apply(component, anchor=anchor))
    return made | {
        "ratio": tokens.back(ratio(tokens.logprobs, tokens.flat(*anchor))),
        "ratio_clipped": tokens.back(tokens.weights_of(component, -torch.ones_like(tokens.advantages), anchor=anchor)),
        "grad": made["grad_token_mean"],
    }


def topr(params: Params, inputs: Inputs) -> list[Outputs]:
    """Per token or per trajectory; both if the vector does not say."""
    levels = [params["level"]] if "level" in params else ["token", "sequence"]
    return [_topr(one_of({"token": "token", "sequence": "sequence"}, level), inputs) for level in levels]


def _topr(level: Any, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    is_by_score = "scores" in inputs
    component: Loss = TOPRByReward(level=level) if is_by_score else TOPR(level=level)
    advantages = tokens.advantages
    more = {"rewards": tokens.flat("scores")} if is_by_score else {}
    loss, clipped = tokens.apply(component, anchor=("lp_mu",), **more)
    # A sample is good if its advantage is positive, unless the score says otherwise.
    unit = torch.where(advantages > 0, 1.0, -1.0).double()
    weights = tokens.back(tokens.weights_of(component, unit, anchor=("lp_mu",), **more))
    return tokens.outputs(loss, clipped) | {"w": (weights, [max(row) for row in weights])}


def sapo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    component = SAPO(**renamed(params, tau_positive="tau_pos", tau_negative="tau_neg"))
    gate = component.gate(ratio(tokens.logprobs, tokens.flat(*PROX)), tokens.advantages)
    return tokens.outputs(*tokens.apply(component)) | {"gate": tokens.back(gate)}


def pg(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    made = tokens.outputs(*tokens.apply(Reinforce()))
    return made | {"grad": made["grad_token_mean"]}


def m2po(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_prox")
    prox, behavior = dense.flat("lp_prox"), dense.flat("lp_mu")
    kept = M2PO(**renamed(params, threshold="threshold")).kept(prox, behavior)
    squares = 2 * kl.k2(prox, behavior)
    return {"mask": dense.back(kept.double()), "M2_before": squares.mean(), "M2_after": squares[kept].mean()}


def aspo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    component = ASPO(**renamed(params, **CLIP, cap_positive="c_pos", cap_negative="c_neg"))
    return tokens.outputs(*tokens.apply(component, anchor=BEHAVIOR))


def dppo(params: Params, inputs: Inputs) -> list[Outputs]:
    """With total variation or with KL; both if the vector does not say."""
    divergences = [params["divergence"]] if "divergence" in params else ["tv", "kl"]
    return [_dppo(one_of({"tv": "tv", "kl": "kl"}, divergence), params, inputs) for divergence in divergences]


def _dppo(divergence: str, params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    options = renamed(params, delta_low="delta", delta_high="delta")
    options |= renamed(params, delta_low="delta_low", delta_high="delta_high", ratio_cap="ratio_cap")
    component = DPPO().with_options({"divergence": divergence, **options})
    made = tokens.outputs(*tokens.apply(component, anchor=("lp_mu",)))
    return made | {"loss_token_verl": made["loss_token"]}


def prime_default(params: Params, inputs: Inputs) -> Outputs:
    one_of({1.0: 1.0}, params.get("adv_tau", 1.0))
    options = renamed(params, delta_low="dppo_mask_low", delta_high="dppo_mask_high", kl_coef="kl_tau")
    return _prime(PrimeRL(**options), inputs)


def prime_ipo(params: Params, inputs: Inputs) -> Outputs:
    one_of({1.0: 1.0}, params.get("adv_tau", 1.0))
    options = renamed(params, delta_low="ipo_threshold", delta_high="ipo_threshold", kl_coef="kl_tau")
    return _prime(PrimeRL(mask="ipo", **options), inputs)


def _prime(component: PrimeRL, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    made = tokens.outputs(*tokens.apply(component, anchor=("lp_mu",)))
    return made | {"grad": made["grad_token_mean"]}


def opmd(params: Params, inputs: Inputs) -> Outputs:
    """Trinity's simple form without an anchor, or Kimi k1.5's form around the behavior policy."""
    tokens = Tokens(inputs)
    options = renamed(params, tau="tau")
    if any(name in inputs for name in BEHAVIOR):
        made = tokens.outputs(*tokens.apply(OPMD(**options), anchor=BEHAVIOR))
    else:
        made = tokens.outputs(*tokens.apply(SimpleOPMD(**options)))
    return made | {"grad": (made["grad_token_mean"], made["grad_unreduced"])}


def dro(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    made = tokens.outputs(*tokens.apply(OPMD(anchor="prox", tau=params["beta"])))
    return made | {"grad": (made["grad_token_mean"], made["grad_unreduced"])}


def vespo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    names = {"k_positive": "k_pos", "k_negative": "k_neg"}
    component = VESPO(**renamed(params, **names, lambda_positive="lambda_pos", lambda_negative="lambda_neg"))
    made = tokens.outputs(*tokens.apply(component, anchor=("lp_mu",)))
    weights = sequence_ratio((tokens.logprobs - tokens.flat("lp_mu")).detach(), **tokens.segments)
    made |= {"W": weights}
    if "seq_advantages" in inputs:
        made["phi"] = component.phi(weights.log(), torch.tensor(inputs["seq_advantages"], dtype=torch.float64))
    return made


def aipo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    weighted, clipped = tokens.apply(AIPO(cap=params["rho"]), anchor=("lp_mu",))
    surrogate, _ = tokens.apply(AIPO(cap=params["rho"], form="surrogate"), anchor=("lp_mu",))
    return {
        "clipfrac": tokens.total(clipped.double()),
        "surrogate_token_mean": tokens.total(surrogate),
        "surrogate_grad": tokens.gradient(tokens.total(surrogate), tokens.logprobs),
        "stopgrad_grad": tokens.gradient(tokens.total(weighted), tokens.logprobs),
    }


def p3o(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs, name="logp")
    advantage, anchor = tokens.advantages, ("behaviour_logp",)
    weights = ratio(tokens.logprobs.detach(), tokens.flat(*anchor))
    fraction = diagnostics.effective_samples(float(weights.sum()), float(weights.square().sum())) / len(weights)

    def loss_of(advantages: torch.Tensor, share: float) -> torch.Tensor:
        return tokens.apply(P3O(), anchor=anchor, advantages=advantages, effective_fraction=share)[0]

    nothing = torch.zeros_like(advantage)
    loss, pull = loss_of(advantage, fraction), loss_of(nothing, fraction)
    return {
        "ess": fraction,
        "weights": tokens.gradient((loss_of(nothing - 1, fraction) - pull).sum(), tokens.logprobs),
        "pg_sum": tokens.total(loss - pull, "token_sum"),
        "kl_behaviour_sum": tokens.total(loss_of(nothing, 0.0), "token_sum"),
        "loss_sum": tokens.total(loss, "token_sum"),
        "grad_wrt_logp": tokens.gradient(loss.sum(), tokens.logprobs),
    }


def decoupled_ppo(params: Params, inputs: Inputs) -> list[Outputs]:
    """The form that users get: the clip times the correction. No parameter selects the correction, so try all of
    WEIGHTS."""
    tokens = Tokens(inputs)
    prox, advantages = tokens.flat("lp_prox"), tokens.advantages
    loss, clipped = tokens.apply(PPOClip(**renamed(params, **CLIP)), anchor=("lp_prox",))
    correction_inputs = CorrectionInputs(
        log_ratio=prox - tokens.flat("lp_mu"), advantages=advantages, **tokens.segments
    )
    candidates: list[Correction] = WEIGHTS
    if "alpha" in params:
        candidates = [IcePop(**renamed(params, low="alpha", high="beta"))]
    elif "C" in params:
        candidates = [TISToken(cap=params["C"]), TISSequence(cap=params["C"])]
    results = []
    for step in candidates:
        weights = chains.weights((step,), correction_inputs)
        results.append(tokens.outputs(loss * weights, clipped) | {"w": tokens.back(weights)})
    return results


WEIGHTS: list[Correction] = [
    TISToken(cap=math.inf),  # the paper
    IcePop(),
    *(kind(cap=cap) for kind in (TISToken, TISSequence) for cap in (2.0, 5.0)),  # verl, AReaL
]


def coupled_ppo(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    clip = renamed(params, **CLIP)
    made = tokens.outputs(*tokens.apply(CoupledPPO(**clip), anchor=("lp_mu",)))
    if "lp_prox" in inputs:
        _, decoupled = tokens.apply(PPOClip(**clip), anchor=("lp_prox",))
        made["decoupled_clipfrac"] = tokens.total(decoupled.double())
    return made


def sft(params: Params, inputs: Inputs) -> Outputs:
    tokens = Tokens(inputs)
    loss, clipped = tokens.apply(SFT())
    return tokens.outputs(loss, clipped) | {
        "slime_sum_of_sample_mean": tokens.num_sequences * tokens.total(loss, "seq_mean_token_mean"),
    }


FORMULAS: dict[str, Adapter] = {
    "aipo": aipo,
    "aspo": aspo,
    "cispo": cispo,
    "coupled_ppo": coupled_ppo,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "dro": dro,
    "gmpo": gmpo,
    "gspo": gspo,
    "m2po": m2po,
    "opmd": opmd,
    "p3o": p3o,
    "pg": pg,
    "ppo_clip": ppo_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "prime_default": prime_default,
    "prime_ipo": prime_ipo,
    "sapo": sapo,
    "sft": sft,
    "topr": topr,
    "vespo": vespo,
}
