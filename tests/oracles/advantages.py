"""Converts oracle vectors of advantages, filters, KL, aggregation, distillation and values to calls and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncrl.policies.advantages.advantage import Advantage, AdvantageInputs
from asyncrl.policies.advantages.groups import GPG, GRPO, OPO, RLOO, AsymRE, DrGRPO, MaxRL, OPMDAdvantage
from asyncrl.policies.advantages.returns import GAE, ReinforcePP, ReinforcePPBaseline, Returns
from asyncrl.policies.algorithms.critic import has_moved, value_loss
from asyncrl.policies.batching import filters
from asyncrl.policies.losses import kl
from asyncrl.policies.losses.distillation import OPD, OPDReward
from asyncrl.policies.losses.ratios import ratio
from tests.oracles.dense import Adapter, Dense, Inputs, Outputs, Params, one_of, renamed

STD = {0: "biased", 1: "unbiased"}

# -- advantages --------------------------------------------------------------------------------------------------------


def per_answer(component: Advantage, inputs: Inputs) -> list[float]:
    """Return the advantage of each answer of the batch, before it becomes float32."""
    given = {"rewards": np.asarray(inputs["rewards"], np.float64), "group": np.asarray(inputs["group"])}
    if "lengths" in component.inputs:
        given["lengths"] = np.asarray(inputs["lengths"])
    made: list[float] = component.formula(**given).tolist()
    return made


def grpo_std(params: Params, inputs: Inputs) -> Outputs:
    component = GRPO(**renamed(params, eps="eps"), std=one_of(STD, params.get("ddof", 1)))
    return {"advantages": per_answer(component, inputs)}


def grpo_mean(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_answer(DrGRPO(), inputs)}


def grpo_batch_std(params: Params, inputs: Inputs) -> Outputs:
    eps = params.get("eps", 1e-6)
    component = GRPO(std_over="batch", std=one_of(STD, params.get("ddof", 1)), eps=eps)
    result = per_answer(component, inputs)
    return {"advantages": result, f"advantages_eps{eps:.0e}".replace("e-0", "e"): result}


def grpo_singleton(params: Params, inputs: Inputs) -> Outputs:
    options = renamed(params, eps="eps")
    raw, zero = (per_answer(GRPO(singleton=choice, **options), inputs) for choice in ("raw", "zero"))
    return {"verl": raw, "nemo": zero, "prime": zero}


def nemo_loo(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_answer(GRPO(baseline="others", std_over="others", **renamed(params, eps="eps")), inputs)}


def rloo(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_answer(RLOO(), inputs)}


def maxrl(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_answer(MaxRL(**renamed(params, eps="eps")), inputs)}


def opo(params: Params, inputs: Inputs) -> Outputs:
    group = np.asarray(inputs["group"])
    rewards, lengths = np.asarray(inputs["rewards"], np.float64), np.asarray(inputs["lengths"], np.float64)
    of_groups = {name: OPO().baseline(rewards[group == name], lengths[group == name]) for name in np.unique(group)}
    baselines = [of_groups[name] for name in group]
    return {
        "baseline": baselines[0] if len(of_groups) == 1 else baselines,
        "advantages": per_answer(OPO(), inputs),
    }


def gpg(params: Params, inputs: Inputs) -> Outputs:
    component = GPG(count="nonzero_rewards", **renamed(params, f_norm="f_norm"))
    alpha = component.alpha(np.asarray(inputs["rewards"], np.float64), np.asarray(inputs["group"]))
    return {"alpha": alpha, "advantages": per_answer(component, inputs)}


def opmd_advantage(params: Params, inputs: Inputs) -> Outputs:
    options = renamed(params, tau="tau")
    return {
        "mean": per_answer(DrGRPO(), inputs),
        "logavgexp": per_answer(OPMDAdvantage(**options), inputs),
        "logavgexp_tau1": per_answer(OPMDAdvantage(tau=1.0), inputs),
        "logavgexp_tau05": per_answer(OPMDAdvantage(tau=0.5), inputs),
    }


def asymre(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_answer(AsymRE(**renamed(params, shift="baseline_shift")), inputs)}


def by_token(component: Advantage, dense: Dense, **given: Any) -> Any:
    """Return the component's result for a batch whose answers are the rows of ``dense``, before it becomes float32."""
    batch = AdvantageInputs(
        **{
            "rewards": np.zeros(dense.num_sequences),
            "group": np.arange(dense.num_sequences),
            "sequence": dense.sequence.numpy(),
            "positions": dense.positions,
            **given,
        }
    )
    return component.formula(**{name: getattr(batch, name) for name in component.inputs})


def reinforce_pp(params: Params, inputs: Inputs) -> Outputs:
    """A row's observations are masked out: the return carries over them, or ends there (SkyRL)."""
    dense = Dense(inputs, like="mask")
    penalty = params["kl_coef"] * dense.flat("kl").numpy() if "kl" in inputs else None
    if penalty is None:
        renamed(params, kl_coef="kl_coef")
    given: dict[str, Any] = {"rewards": np.asarray(inputs["scores"], np.float64), "kl": penalty}
    options = renamed(params, gamma="gamma")
    rewards = AdvantageInputs(
        rewards=given["rewards"], group=np.arange(dense.num_sequences), sequence=dense.sequence.numpy(), kl=penalty
    ).token_rewards
    outputs: Outputs = {"token_rewards": dense.back(rewards)}
    for name, observations in (("", "carry"), ("_carry", "carry"), ("_verl", "carry"), ("_skyrl", "reset")):
        returned = by_token(Returns(observations=observations, **options), dense, **given)
        component = ReinforcePP(observations=observations, **options, **renamed(params, eps="eps"))
        outputs[f"returns{name}"] = dense.back(returned)
        outputs[f"advantages{name}"] = dense.back(by_token(component, dense, **given))
    return outputs


def reinforce_pp_baseline(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="mask")
    given = {"rewards": np.asarray(inputs["rewards"], np.float64), "group": np.asarray(inputs["group"])}
    component = ReinforcePPBaseline(**renamed(params, eps="eps"))
    return {"advantages": dense.back(by_token(component, dense, **given))}


def reinforce(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="rewards")
    returned = by_token(Returns(**renamed(params, gamma="gamma")), dense, kl=-dense.flat("rewards").numpy())
    return {"returns": dense.back(returned)}


def gae(params: Params, inputs: Inputs) -> Outputs:
    return _gae(params, inputs, whitening="none")


def gae_whiten(params: Params, inputs: Inputs) -> Outputs:
    return _gae(params, inputs, whitening="unbiased", **renamed(params, eps="eps"))


def _gae(params: Params, inputs: Inputs, **options: Any) -> Outputs:
    """Token rewards are passed as a subtracted KL; a row with a ``bootstrap`` was cut."""
    dense = Dense(inputs, like="rewards")
    is_cut = "bootstrap" in inputs
    nothing = np.zeros(dense.num_sequences)
    advantage, target = by_token(
        GAE(truncated="bootstrap" if is_cut else "end", **options, **renamed(params, gamma="gamma", lam="lam")),
        dense,
        kl=-dense.flat("rewards").numpy(),
        values=dense.flat("values").numpy(),
        is_truncated=np.full(dense.num_sequences, is_cut),
        final_values=np.asarray(inputs["bootstrap"], np.float64) if is_cut else nothing,
    )
    return {
        "advantages": dense.back(advantage),
        "advantages_masked": dense.back(advantage),
        "returns": dense.back(target),
        "returns_masked": dense.back(target),
    }


# -- filters -----------------------------------------------------------------------------------------------------------


def dapo_overlong(params: Params, inputs: Inputs) -> list[Outputs]:
    """Beyond L_max with a floor, as in the paper, or without one, as in verl; no parameter selects between them."""
    options = {"max_tokens": params["L_max"], "cache_tokens": params["L_cache"], "factor": params.get("factor", 1.0)}
    return [
        {"penalty": filters.overlong_penalty(inputs["lengths"], has_floor=has_floor, **options)}
        for has_floor in (True, False)
    ]


def dapo_filter(params: Params, inputs: Inputs) -> Outputs:
    tolerance = params.get("tol", 1e-6)
    return {"keep": [filters.has_spread(rewards, tolerance=tolerance) for rewards in inputs["groups"]]}


# -- KL ----------------------------------------------------------------------------------------------------------------


def kl_estimates(params: Params, inputs: Inputs) -> Outputs:
    pair = [torch.tensor(inputs[name], dtype=torch.float64) for name in ("lp", "lp_ref")]
    return {"k1": kl.k1(*pair), "k2": kl.k2(*pair), "k3": kl.k3(*pair), "abs": kl.absolute(*pair)}


def kl_low_var(params: Params, inputs: Inputs) -> Outputs:
    pair = [torch.tensor(inputs[name], dtype=torch.float64) for name in ("lp", "lp_ref")]
    return {"verl": kl.low_variance(*pair), "slime_low_var": kl.low_variance(*pair)}


def kl_exact(params: Params, inputs: Inputs) -> Outputs:
    """Expectations by enumeration over the three outcomes."""
    p, q, mu = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("p", "q", "mu"))
    pair = p.log(), q.log()
    return {
        "kl": (p * kl.k1(*pair)).sum(),
        "E_p_k1": (p * kl.k1(*pair)).sum(),
        "E_p_k2": (p * kl.k2(*pair)).sum(),
        "E_p_k3": (p * kl.k3(*pair)).sum(),
        "E_mu_k3_uncorrected": (mu * kl.k3(*pair)).sum(),
        "E_mu_w_k3": (mu * kl.unbiased(*pair, mu.log())).sum(),
        "E_mu_w_k1": (mu * ratio(p.log(), mu.log()) * kl.k1(*pair)).sum(),
    }


def kl_grad(params: Params, inputs: Inputs) -> Outputs:
    """Expected gradients with respect to the logits of p, by enumeration and autograd."""
    p, q, mu = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("p", "q", "mu"))

    def gradient(weights: torch.Tensor | None, estimate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the estimate's expectation under ``weights``.

        With None, the expectation is under p itself, and p then has a gradient.
        """
        logits = p.log().requires_grad_()
        logprobs = torch.log_softmax(logits, -1)
        under = logprobs.exp() if weights is None else weights
        (result,) = torch.autograd.grad((under * estimate(logprobs)).sum(), logits)
        return result

    return {
        "exact_dKL_dlogits": gradient(None, lambda logprobs: kl.k1(logprobs, q.log())),
        "E_grad_k1_as_loss": gradient(p, lambda logprobs: kl.k1(logprobs, q.log())),
        "E_grad_k2_as_loss": gradient(p, lambda logprobs: kl.k2(logprobs, q.log())),
        "E_grad_k3_as_loss": gradient(p, lambda logprobs: kl.k3(logprobs, q.log())),
        "E_grad_unbiased_ratio_live": gradient(mu, lambda logprobs: kl.unbiased(logprobs, q.log(), mu.log())),
        "E_grad_unbiased_ratio_detached": gradient(
            mu, lambda logprobs: kl.unbiased(logprobs, q.log(), mu.log(), is_ratio_live=False)
        ),
    }


def kl_unbiased(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    value = kl.unbiased(logprobs, dense.flat("lp_ref"), dense.flat("lp_mu"))
    return {"value": dense.back(value), "grad_lp_theta": dense.gradient(value.sum(), logprobs)}


# -- aggregation -------------------------------------------------------------------------------------------------------


def loss_agg(params: Params, inputs: Inputs) -> list[Outputs]:
    """A fully masked row counts in a mean of rows or is skipped; both variants if the vector does not say."""
    return [_aggregated(params, inputs, masked) for masked in ("count", "skip")]


def _aggregated(params: Params, inputs: Inputs, masked: str) -> Outputs:
    dense = Dense(inputs, like="loss")
    loss = dense.flat("loss")
    constant = float(params.get("loss_scale_factor", dense.shape[-1]))
    outputs: Outputs = {mode.replace("_", "-"): dense.total(loss, mode) for mode in ("token_mean", "token_sum")}
    for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
        outputs[mode.replace("_", "-")] = dense.total(loss, mode, masked_answers=masked)
    outputs["seq-mean-token-sum-norm"] = dense.total(
        loss, "seq_mean_token_sum_norm", max_response_tokens=constant, masked_answers=masked
    )
    if "prompt_boundaries" in inputs:
        bounds = inputs["prompt_boundaries"]
        group = [name for name, (start, end) in enumerate(bounds) for _ in range(start, end)]
        outputs["prompt_mean"] = dense.total(loss, "prompt_mean", group=group, masked_prompts=masked)
    return outputs


# -- distillation and values -------------------------------------------------------------------------------------------


def opd(params: Params, inputs: Inputs) -> Outputs:
    """The loss form; or the reward form if there are advantages but no behavior logprobs."""
    if "lp_mu" not in inputs:
        return opd_reward(params, inputs)
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    options = renamed(params, max_drop="tv", kl_coef="kl_tau")
    loss, dropped = OPD(**options).formula(logprobs, dense.flat("lp_mu"), dense.flat("lp_ref"))
    mean = dense.total(loss)
    return {
        "keep": dense.back((~dropped).double()),
        "token_mean": mean,
        "grad": dense.gradient(mean, logprobs),
    }


def opd_reward(params: Params, inputs: Inputs) -> Outputs:
    names = ("lp_old", "lp_prox", "lp_theta", "lp_student")
    student = next((name for name in names if name in inputs), names[0])
    dense = Dense(inputs, like=student)
    result = OPDReward(**renamed(params, coef="coef")).mixed(
        dense.flat(student), dense.flat("advantages", "adv"), dense.flat("lp_ref", "lp_teacher")
    )
    return {"advantages": dense.back(result)}


def value_clip(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="values")
    critic, old, target = dense.live("values"), dense.flat("old_values"), dense.flat("returns")
    clip = renamed(params, clip="cliprange")
    loss, clipped = value_loss(critic, old, target, **clip)
    unscaled, _ = value_loss(critic, old, target, scale=1.0, **clip)
    mean = dense.total(loss)
    moved = has_moved(critic, old, **clip)
    return {
        "per_token_max": dense.back(unscaled),
        "verl": mean,
        "slime_sum_of_sample_mean": dense.num_sequences * dense.total(unscaled, "seq_mean_token_mean"),
        "clipfrac_loss": dense.total(clipped.double()),
        "slime_clipfrac": dense.total(moved.double()),
        "grad_verl": dense.gradient(mean, critic),
    }


def value_huber(params: Params, inputs: Inputs) -> Outputs:
    critic = torch.tensor(inputs["diff"], dtype=torch.float64)
    zeros = torch.zeros_like(critic)
    options = renamed(params, huber_delta="delta")
    loss, _ = value_loss(critic, zeros, zeros, kind="huber", clip=None, **options)
    return {"loss": loss}


FORMULAS: dict[str, Adapter] = {
    "asymre": asymre,
    "dapo_filter": dapo_filter,
    "dapo_overlong": dapo_overlong,
    "gae": gae,
    "gae_whiten": gae_whiten,
    "gpg": gpg,
    "grpo_batch_std": grpo_batch_std,
    "grpo_mean": grpo_mean,
    "grpo_singleton": grpo_singleton,
    "grpo_std": grpo_std,
    "kl": kl_estimates,
    "kl_exact": kl_exact,
    "kl_grad": kl_grad,
    "kl_low_var": kl_low_var,
    "kl_unbiased": kl_unbiased,
    "loss_agg": loss_agg,
    "maxrl": maxrl,
    "nemo_loo": nemo_loo,
    "opd": opd,
    "opd_adv": opd_reward,
    "opd_advantage": opd_reward,
    "opmd_adv": opmd_advantage,
    "opo": opo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "value_clip": value_clip,
    "value_huber": value_huber,
}
