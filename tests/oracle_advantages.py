"""Oracle vectors of advantages, returns, filters, KL, aggregation, distillation and values: to calls and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncrl.policies import advantages, distillation, filters, kl, returns, values
from asyncrl.policies.catalogue import ADVANTAGES, Rewarded
from asyncrl.policies.losses.ratios import ratio
from tests.oracle_dense import Adapter, Dense, Inputs, NotOffered, Outputs, Params, one_of, renamed

STD = {0: "biased", 1: "unbiased"}

# -- advantages --------------------------------------------------------------------------------------------------------


def per_group(inputs: Inputs, function: Callable[..., Any], *more: str) -> list[float]:
    """``function`` of each group's rewards (and of more inputs), put back in the batch's order."""
    group = np.asarray(inputs["group"])
    result = np.zeros(len(group))
    for name in np.unique(group):
        member = group == name
        result[member] = function(*(np.asarray(inputs[key], np.float64)[member] for key in ("rewards", *more)))
    return result.tolist()


def grpo_std(params: Params, inputs: Inputs) -> Outputs:
    options = renamed(params, eps="eps") | {"std": one_of(STD, params.get("ddof", 1))}
    return {"advantages": per_group(inputs, lambda rewards: advantages.grpo(rewards, **options))}


def grpo_mean(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_group(inputs, advantages.dr_grpo)}


def grpo_batch_std(params: Params, inputs: Inputs) -> Outputs:
    spread = advantages.reward_std(inputs["rewards"], std=one_of(STD, params.get("ddof", 1)))
    eps = params.get("eps", 1e-6)
    result = per_group(inputs, lambda rewards: advantages.grpo(rewards, batch_std=spread, eps=eps))
    return {"advantages": result, f"advantages_eps{eps:.0e}".replace("e-0", "e"): result}


def grpo_singleton(params: Params, inputs: Inputs) -> Outputs:
    options = renamed(params, eps="eps")
    raw = per_group(inputs, lambda rewards: advantages.grpo(rewards, singleton="raw", **options))
    zero = per_group(inputs, lambda rewards: advantages.grpo(rewards, singleton="zero", **options))
    return {"verl": raw, "nemo": zero, "prime": zero}


def rloo(params: Params, inputs: Inputs) -> Outputs:
    return {"advantages": per_group(inputs, advantages.rloo)}


def maxrl(params: Params, inputs: Inputs) -> Outputs:
    options = renamed(params, eps="eps")
    return {"advantages": per_group(inputs, lambda rewards: advantages.maxrl(rewards, **options))}


def opo(params: Params, inputs: Inputs) -> Outputs:
    baselines = per_group(inputs, advantages.opo_baseline, "lengths")
    is_one_group = len(set(inputs["group"])) == 1
    return {
        "baseline": baselines[0] if is_one_group else baselines,
        "advantages": per_group(inputs, advantages.opo, "lengths"),
    }


def gpg(params: Params, inputs: Inputs) -> Outputs:
    alpha = advantages.gpg_alpha(inputs["rewards"], inputs["group"])
    f_norm = params.get("f_norm", 1.0)
    result = per_group(inputs, lambda rewards: advantages.gpg(rewards, alpha=alpha, f_norm=f_norm))
    return {"alpha": alpha, "advantages": result}


def reinforce_pp(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="mask")
    penalty = (
        {"kl": dense.flat("kl"), "kl_coef": params["kl_coef"]} if "kl" in inputs else renamed(params, kl_coef="kl_coef")
    )
    gamma = params.get("gamma", 1.0)
    rewards = returns.token_rewards(inputs["scores"], dense.sequence, **penalty)
    require_eps(params)
    batch = Rewarded(
        rewards=np.asarray(inputs["scores"], np.float64),
        group=np.arange(dense.num_sequences),
        sequence=dense.sequence.numpy(),
        kl=params["kl_coef"] * dense.flat("kl").numpy() if "kl" in inputs else None,
    )
    whitened = by_row("reinforce_pp", batch, gamma=gamma)
    return {
        "token_rewards": dense.back(rewards),
        "returns": dense.back(returns.reinforce(rewards, dense.sequence, gamma=gamma)),
        "advantages": dense.back(whitened),
    }


def reinforce_pp_baseline(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="mask")
    eps = params.get("eps", 1e-8)
    return {
        "advantages": dense.back(
            returns.reinforce_pp_baseline(inputs["rewards"], inputs["group"], dense.sequence, eps=eps)
        )
    }


def reinforce(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="rewards")
    gamma = params.get("gamma", 1.0)
    return {"returns": dense.back(returns.reinforce(dense.flat("rewards"), dense.sequence, gamma=gamma))}


def gae(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="rewards")
    advantage, target = returns.gae(
        dense.flat("rewards"),
        dense.flat("values"),
        dense.sequence,
        gamma=params.get("gamma", 1.0),
        lam=params.get("lam", 1.0),
        bootstrap=inputs.get("bootstrap"),
    )
    return {
        "advantages": dense.back(advantage),
        "advantages_masked": dense.back(advantage),
        "returns": dense.back(target),
        "returns_masked": dense.back(target),
    }


def gae_whiten(params: Params, inputs: Inputs) -> Outputs:
    """Through the row, which whitens."""
    dense = Dense(inputs, like="rewards")
    require_eps(params)
    is_cut = "bootstrap" in inputs
    batch = Rewarded(
        rewards=np.zeros(dense.num_sequences),
        group=np.arange(dense.num_sequences),
        sequence=dense.sequence.numpy(),
        is_truncated=np.full(dense.num_sequences, is_cut),
        kl=-dense.flat("rewards").numpy(),  # what tokens get beside their answer's reward, taken off
        values=dense.flat("values").numpy(),
        final_values=np.asarray(inputs["bootstrap"] if is_cut else np.zeros(dense.num_sequences), np.float64),
    )
    options = renamed(params, gamma="gamma", lam="lam") | {"truncated": "bootstrap" if is_cut else "end"}
    whitened, target = by_row("gae", batch, **options)
    return {
        "advantages": dense.back(whitened),
        "advantages_masked": dense.back(whitened),
        "returns": dense.back(target),
        "returns_masked": dense.back(target),
    }


def by_row(name: str, batch: Rewarded, **options: Any) -> Any:
    """What the row makes of the batch, before it becomes float32."""
    row = ADVANTAGES[name]
    return row.function(*(getattr(batch, need) for need in row.needs), **{**row.options, **options})


def require_eps(params: Params) -> None:
    """The rows of the table whiten with one eps."""
    if params.get("eps", 1e-8) != 1e-8:
        raise NotOffered("eps")


# -- filters -----------------------------------------------------------------------------------------------------------


def dapo_overlong(params: Params, inputs: Inputs) -> list[Outputs]:
    """Beyond L_max with a floor, as in the paper, or without, as in verl: no parameter says which."""
    options = {"max_tokens": params["L_max"], "cache_tokens": params["L_cache"], "factor": params.get("factor", 1.0)}
    return [
        {"penalty": filters.overlong_penalty(inputs["lengths"], has_floor=has_floor, **options)}
        for has_floor in (True, False)
    ]


def dapo_filter(params: Params, inputs: Inputs) -> Outputs:
    tolerance = params.get("tol", 1e-6)
    return {"keep": [filters.has_spread(rewards, tolerance=tolerance) for rewards in inputs["groups"]]}


# -- KL and entropy ----------------------------------------------------------------------------------------------------


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
        "kl": distillation.reverse_kl(*pair),
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

    def gradient(weights: torch.Tensor, estimate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        logits = p.log().requires_grad_()
        (result,) = torch.autograd.grad((weights * estimate(torch.log_softmax(logits, -1))).sum(), logits)
        return result

    ones = torch.ones(1, dtype=torch.float64)
    return {
        "exact_dKL_dlogits": gradient(ones, lambda logprobs: distillation.reverse_kl(logprobs, q.log())),
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


def entropy(params: Params, inputs: Inputs) -> Outputs:
    logits = torch.tensor(inputs["logits"], dtype=torch.float64, requires_grad=True)
    result = kl.entropy(logits)
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    return {"entropy": result, "dH_dlogits": gradient}


# -- aggregation -------------------------------------------------------------------------------------------------------


def loss_agg(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="loss")
    loss = dense.flat("loss")
    constant = params.get("loss_scale_factor", dense.shape[-1])
    modes = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean")
    outputs = {mode.replace("_", "-"): dense.total(loss, mode) for mode in modes}
    outputs["seq-mean-token-sum-norm"] = dense.total(loss, "seq_mean_token_sum_norm", max_response_tokens=constant)
    if "prompt_boundaries" in inputs:
        bounds = inputs["prompt_boundaries"]
        group = [name for name, (start, end) in enumerate(bounds) for _ in range(start, end)]
        outputs["prompt_mean"] = dense.total(loss, "prompt_mean", group=group)
    return outputs


# -- distillation and values -------------------------------------------------------------------------------------------


def opd(params: Params, inputs: Inputs) -> Outputs:
    """The loss form; the reward form where there are advantages and no behavior logprobs."""
    if "lp_mu" not in inputs:
        return opd_advantage(params, inputs)
    dense = Dense(inputs, like="lp_theta")
    logprobs = dense.live("lp_theta")
    options = renamed(params, max_drop="tv", kl_coef="kl_tau")
    loss, dropped = distillation.opd(logprobs, dense.flat("lp_mu"), dense.flat("lp_ref"), **options)
    mean = dense.total(loss)
    return {
        "keep": dense.back((~dropped).double()),
        "token_mean": mean,
        "grad": dense.gradient(mean, logprobs),
    }


def opd_advantage(params: Params, inputs: Inputs) -> Outputs:
    names = ("lp_old", "lp_prox", "lp_theta", "lp_student")
    student = next((name for name in names if name in inputs), names[0])
    dense = Dense(inputs, like=student)
    result = distillation.opd_advantages(
        dense.flat("advantages", "adv"),
        dense.flat(student),
        dense.flat("lp_ref", "lp_teacher"),
        **renamed(params, coef="coef"),
    )
    return {"advantages": dense.back(result)}


def distill(params: Params, inputs: Inputs) -> Outputs:
    student, teacher = (torch.tensor(inputs[name], dtype=torch.float64).log() for name in ("student", "teacher"))
    return {
        "forward": distillation.forward_kl(student, teacher),
        "reverse": distillation.reverse_kl(student, teacher),
        "mixed": distillation.mixed_kl(student, teacher, **renamed(params, weight="mixed_kl_weight")),
    }


def value_clip(params: Params, inputs: Inputs) -> Outputs:
    dense = Dense(inputs, like="values")
    critic, old, target = dense.live("values"), dense.flat("old_values"), dense.flat("returns")
    clip = renamed(params, clip="cliprange")
    loss, clipped = values.value_loss(critic, old, target, **clip)
    unscaled, _ = values.value_loss(critic, old, target, scale=1.0, **clip)
    mean = dense.total(loss)
    moved = values.has_moved(critic, old, **clip)
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
    loss, _ = values.value_loss(critic, zeros, zeros, kind="huber", clip=None, **options)
    return {"loss": loss}


FORMULAS: dict[str, Adapter] = {
    "dapo_filter": dapo_filter,
    "dapo_overlong": dapo_overlong,
    "distill": distill,
    "entropy": entropy,
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
    "opd": opd,
    "opd_adv": opd_advantage,
    "opd_advantage": opd_advantage,
    "opo": opo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "value_clip": value_clip,
    "value_huber": value_huber,
}
