"""Oracle vectors of policy losses: to calls and back."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from asyncrl.policies import corrections, diagnostics, kl, losses
from asyncrl.policies.losses.ratios import ratio
from tests.oracle_dense import CLIP, Dense, Inputs, Outputs, Params, renamed


def ppo_clip(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor = dense.live("lp_theta"), dense.flat("lp_old", "lp_prox")
    options = renamed(params, **CLIP, dual_clip="c")
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
    return ppo_clip({"c": 3.0} | dict(params.items()), inputs)


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


def topr(params: Params, inputs: Inputs) -> Outputs:
    """Per token; per trajectory where the vector says so."""
    dense = Dense(inputs, like="lp_theta")
    logprobs, anchor, advantage = dense.live("lp_theta"), dense.flat("lp_mu"), dense.flat("advantages")
    level = params.get("level", "sequence" if "sequence" in params["id"] else "token")
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


def dppo(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    options = renamed(params, delta_low="delta", delta_high="delta")
    options |= renamed(params, delta_low="delta_low", delta_high="delta_high", ratio_cap="ratio_cap")
    if "kl" in params["id"]:
        options = {"delta_low": 0.05, "delta_high": 0.05} | options | {"divergence": "kl"}
    loss, masked = losses.dppo(logprobs, dense.flat("lp_mu"), dense.flat("advantages"), **options)
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


def decoupled_ppo(params: Params, inputs: Inputs) -> Outputs:
    """Which correction gives the weights is said by the vector's name only."""
    dense = Dense(inputs, like="lp_theta")
    logprobs, prox = dense.live("lp_theta"), dense.flat("lp_prox")
    weights = _decoupled_weights(params, prox - dense.flat("lp_mu"), dense)
    loss, _ = losses.decoupled_ppo(logprobs, prox, dense.flat("advantages"), weights=weights, **renamed(params, **CLIP))
    mean = dense.total(loss)
    return {
        "w": dense.back(weights),
        "loss_token": dense.back(loss),
        "token_mean": mean,
        "seq_mean_token_mean": dense.total(loss, "seq_mean_token_mean"),
        "grad_token_mean": dense.gradient(mean, logprobs),
    }


def _decoupled_weights(params: Params, log_ratio: torch.Tensor, dense: Dense) -> torch.Tensor:
    name = params["id"]
    cap = re.search(r"_C(\d+)", name)
    options = {"cap": float(cap[1])} if cap else renamed(params, cap="C")
    if "seq_tis" in name:
        return corrections.tis_sequence(log_ratio, **dense.segments, **options)
    if "tis" in name:
        return corrections.tis_token(log_ratio, **options)
    if "icepop" in name:
        return corrections.icepop(log_ratio, **renamed(params, low="alpha", high="beta"))
    if "identity" in name or "paper" in name:
        return corrections.tis_token(log_ratio, cap=float("inf"))
    raise NotImplementedError(f"which weights {name} means")


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


FORMULAS: dict[str, Callable[[Params, Inputs], Outputs]] = {
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
