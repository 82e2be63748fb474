"""Oracle vectors of policy losses: to calls and back."""

from __future__ import annotations

import math

import torch

from asyncrl.policies import correction_chains, corrections, diagnostics, kl, losses
from asyncrl.policies.catalogue import LOSSES
from asyncrl.policies.correction_chains import Evidence, chain
from asyncrl.policies.losses.ratios import ratio
from tests.oracle_dense import Adapter, Dense, Inputs, Outputs, Params, renamed

CLIP = {"clip_low": "eps_low", "clip_high": "eps_high"}


def ppo_clip(params: Params, inputs: Inputs, **defaults: float) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor = dense.live("lp_theta"), dense.flat("lp_old", "lp_prox")
    options = defaults | renamed(params, **CLIP, dual_clip="c")
    loss, clipped = losses.ppo_clip(logprobs, anchor, dense.flat("adv", "advantages"), **options)
    mean = dense.total(loss)
    return {
        "ratio": dense.back(ratio(logprobs, anchor)),
        "loss": (dense.back(loss), mean),
        "loss_token": dense.back(loss),
        "grad": (dense.gradient(loss.sum(), logprobs), dense.gradient(mean, logprobs)),
        "clipped": dense.back(clipped),
        "token_mean": mean,
        "grad_token_mean": dense.gradient(mean, logprobs),
    }


def ppo_dual_clip(params: Params, inputs: Inputs) -> Outputs:
    return ppo_clip(params, inputs, dual_clip=3.0)


def gspo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor = dense.live("lp_theta"), dense.flat("lp_prox", "lp_old")
    loss, _ = losses.gspo(logprobs, anchor, dense.flat("advantages"), **dense.segments, **renamed(params, **CLIP))
    mean = dense.total(loss, "seq_mean_token_mean")
    return {
        "seq_ratio": corrections.geometric_ratio((logprobs - anchor).detach(), **dense.segments),
        "loss_token": dense.back(loss),
        "loss": mean,
        "grad": dense.gradient(mean, logprobs),
    }


def cispo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor = dense.live("lp_theta"), dense.flat("lp_old", "lp_prox", "lp_mu")
    if "epsilon_high" in params:  # TRL's name, and TRL's cap is absolute
        options = {"cap_mode": "absolute", "clip_high": params["epsilon_high"]}
    else:
        options = {"cap_mode": "one_plus"} | renamed(params, **CLIP)
    loss, _ = losses.cispo(logprobs, anchor, dense.flat("advantages"), **options)
    # With advantage -1 the gradient is the weight itself.
    weight, _ = losses.cispo(logprobs, anchor, -torch.ones_like(anchor), **options)
    mean = dense.total(loss)
    return {
        "ratio": dense.back(ratio(logprobs, anchor)),
        "ratio_clipped": dense.gradient(weight.sum(), logprobs),
        "loss_token": dense.back(loss),
        "token_mean": mean,
        "grad": dense.gradient(mean, logprobs),
    }


def topr(params: Params, inputs: Inputs) -> list[Outputs]:
    """Per token or per trajectory; either where the vector does not say."""
    levels = [params["level"]] if "level" in params else ["token", "sequence"]
    return [_topr(level, inputs) for level in levels]


def _topr(level: str, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor, advantage = dense.live("lp_theta"), dense.flat("lp_mu"), dense.flat("advantages")
    good = dense.flat("scores") > 0 if "scores" in inputs else advantage > 0
    options = dense.segments | {"level": level, "is_positive": good}
    loss, _ = losses.topr(logprobs, anchor, advantage, **options)
    weight, _ = losses.topr(logprobs, anchor, -torch.ones_like(anchor), **options)
    weights = dense.gradient(weight.sum(), logprobs)
    return {
        "w": (weights, [max(row) for row in weights]),
        "loss_token": dense.back(loss),
        "token_mean": dense.total(loss),
        "grad_unreduced": dense.gradient(loss.sum(), logprobs),
    }


def sapo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    arguments = dense.live("lp_theta"), dense.flat("lp_old", "lp_prox"), dense.flat("advantages")
    options = renamed(params, tau_positive="tau_pos", tau_negative="tau_neg")
    loss, _ = losses.sapo(*arguments, **options)
    return {
        "gate": dense.back(losses.sapo_gate(*arguments, **options)),
        "loss_token": dense.back(loss),
        "grad_unreduced": dense.gradient(loss.sum(), arguments[0]),
        "seq_mean_token_mean": dense.total(loss, "seq_mean_token_mean"),
        "token_mean": dense.total(loss),
    }


def pg(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    loss, _ = losses.reinforce(logprobs, dense.flat("advantages"))
    mean = dense.total(loss)
    return {"loss_token": dense.back(loss), "token_mean": mean, "grad": dense.gradient(mean, logprobs)}


def m2po(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_prox")
    prox, behavior = dense.flat("lp_prox"), dense.flat("lp_mu")
    kept = losses.m2po_mask(prox, behavior, **renamed(params, threshold="threshold"))
    squares = 2 * kl.k2(prox, behavior)
    return {"mask": dense.back(kept.double()), "M2_before": squares.mean(), "M2_after": squares[kept].mean()}


def aspo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    options = renamed(params, **CLIP, cap_positive="c_pos", cap_negative="c_neg")
    loss, _ = losses.aspo(logprobs, dense.flat("lp_old", "lp_prox"), dense.flat("advantages"), **options)
    return {
        "loss_token": dense.back(loss),
        "grad_unreduced": dense.gradient(loss.sum(), logprobs),
        "token_mean": dense.total(loss),
    }


def dppo(params: Params, inputs: Inputs) -> list[Outputs]:
    """Of total variation or of KL; either where the vector does not say."""
    divergences = [params["divergence"]] if "divergence" in params else ["tv", "kl"]
    return [_dppo(divergence, params, inputs) for divergence in divergences]


def _dppo(divergence: str, params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    options = renamed(params, delta_low="delta", delta_high="delta")
    options |= renamed(params, delta_low="delta_low", delta_high="delta_high", ratio_cap="ratio_cap")
    if divergence == "kl":  # the paper's default of it
        options = {"delta_low": 0.05, "delta_high": 0.05} | options
    loss, masked = losses.dppo(
        logprobs, dense.flat("lp_mu"), dense.flat("advantages"), divergence=divergence, **options
    )
    return {
        "keep": dense.back((~masked).double()),
        "loss_token_verl": dense.back(loss),
        "loss_token": dense.back(loss),
        "grad_unreduced": dense.gradient(loss.sum(), logprobs),
    }


def aipo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, behavior, advantage = dense.live("lp_theta"), dense.flat("lp_mu"), dense.flat("advantages")
    weighted, _ = losses.aipo(logprobs, behavior, advantage, cap=params["rho"])
    surrogate, _ = losses.aipo(logprobs, behavior, advantage, cap=params["rho"], is_surrogate=True)
    return {
        "surrogate_token_mean": dense.total(surrogate),
        "surrogate_grad": dense.gradient(dense.total(surrogate), logprobs),
        "stopgrad_grad": dense.gradient(dense.total(weighted), logprobs),
    }


def p3o(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="logp")
    logprobs, behavior, advantage = dense.live("logp"), dense.flat("behaviour_logp"), dense.flat("advantages")
    weights = ratio(logprobs.detach(), behavior)
    fraction = diagnostics.effective_samples(float(weights.sum()), float(weights.square().sum())) / len(weights)
    loss, _ = losses.p3o(logprobs, behavior, advantage, effective_fraction=fraction)
    anchor, _ = losses.p3o(logprobs, behavior, torch.zeros_like(advantage), effective_fraction=0.0)
    pull, _ = losses.p3o(logprobs, behavior, torch.zeros_like(advantage), effective_fraction=fraction)
    weight, _ = losses.p3o(logprobs, behavior, -torch.ones_like(advantage), effective_fraction=fraction)
    return {
        "ess": fraction,
        "weights": dense.gradient((weight - pull).sum(), logprobs),
        "pg_sum": dense.total(loss - pull, "token_sum"),
        "kl_behaviour_sum": dense.total(anchor, "token_sum"),
        "loss_sum": dense.total(loss, "token_sum"),
        "grad_wrt_logp": dense.gradient(loss.sum(), logprobs),
    }


def decoupled_ppo(params: Params, inputs: Inputs) -> list[Outputs]:
    """What users get: the row's clip times the correction. No parameter says which correction: any of WEIGHTS."""
    dense = Dense(inputs, like="lp_theta")
    logprobs, prox, advantage = dense.live("lp_theta"), dense.flat("lp_prox"), dense.flat("advantages")
    clip = {**LOSSES["ppo_clip"].options, **renamed(params, **CLIP)}
    loss, _ = LOSSES["ppo_clip"].function(logprobs, prox, advantage, **clip)
    evidence = Evidence(log_ratio=prox - dense.flat("lp_mu"), advantages=advantage, **dense.segments)
    if "alpha" in params:
        specs = [{"name": "icepop", **renamed(params, low="alpha", high="beta")}]
    elif "C" in params:
        specs = [{"name": name, "cap": params["C"]} for name in ("tis_token", "tis_sequence")]
    else:
        specs = WEIGHTS
    return [_weighted(loss, correction_chains.weights(chain([spec]), evidence), logprobs, dense) for spec in specs]


WEIGHTS = [
    {"name": "tis_token", "cap": math.inf},  # the paper
    {"name": "icepop"},
    *({"name": name, "cap": cap} for name in ("tis_token", "tis_sequence") for cap in (2.0, 5.0)),  # verl, AReaL
]


def _weighted(loss: torch.Tensor, weights: torch.Tensor, logprobs: torch.Tensor, dense: Dense) -> Outputs:
    weighted = loss * weights
    mean = dense.total(weighted)
    return {
        "w": dense.back(weights),
        "loss_token": dense.back(weighted),
        "token_mean": mean,
        "seq_mean_token_mean": dense.total(weighted, "seq_mean_token_mean"),
        "grad_token_mean": dense.gradient(mean, logprobs),
    }


def coupled_ppo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, advantage, clip = dense.live("lp_theta"), dense.flat("advantages"), renamed(params, **CLIP)
    loss, clipped = losses.coupled_ppo(logprobs, dense.flat("lp_mu"), advantage, **clip)
    _, decoupled_clipped = losses.ppo_clip(logprobs, dense.flat("lp_prox"), advantage, **clip)
    mean = dense.total(loss)
    return {
        "loss_token": dense.back(loss),
        "token_mean": mean,
        "clipfrac": dense.total(clipped.double()),
        "decoupled_clipfrac": dense.total(decoupled_clipped.double()),
        "grad_token_mean": dense.gradient(mean, logprobs),
    }


def sft(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    loss, _ = losses.sft(dense.flat("lp_theta"))
    return {
        "token_mean": dense.total(loss),
        "slime_sum_of_sample_mean": dense.num_sequences * dense.total(loss, "seq_mean_token_mean"),
    }


FORMULAS: dict[str, Adapter] = {
    "aipo": aipo,
    "aspo": aspo,
    "cispo": cispo,
    "coupled_ppo": coupled_ppo,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "gspo": gspo,
    "m2po": m2po,
    "p3o": p3o,
    "pg": pg,
    "ppo_clip": ppo_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "sapo": sapo,
    "sft": sft,
    "topr": topr,
}
