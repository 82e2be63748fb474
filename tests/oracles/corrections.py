"""Converts oracle vectors of corrections, their diagnostics and their exact bias to calls and back.

FORMULAS maps a vector's ``formula`` to a function of its params and inputs that returns every name the vector may
expect. Dense arrays [B, T] with a mask become flat arrays. This file converts only names, shapes and defaults; it has
no formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.contrib.losses.corrections import OPSM, Clamp, KStat, OutlierMask, TISPrefix
from asyncrl.policies.corrections import diagnostics
from asyncrl.policies.corrections.chains import Chain, weights
from asyncrl.policies.corrections.correction import Correction, CorrectionInputs, geometric_ratio, ratio, sequence_ratio
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
from asyncrl.policies.losses.segments import segment_max, segment_mean
from tests.harness import enumeration
from tests.oracles.dense import Adapter, Dense, Inputs, NotOffered, Outputs, Params, one_of


class Ratios(Dense):
    """The inputs of corrections and diagnostics, from a vector with log ratios or with the logprobs to compute them."""

    def __init__(self, inputs: Inputs) -> None:
        names = ("log_ratio", "lp_prox", "lp_theta", "lp_behaviour")
        super().__init__(inputs, like=next((name for name in names if name in inputs), names[0]))

    @property
    def log_ratio(self) -> torch.Tensor:
        if "log_ratio" in self.inputs:
            return self.flat("log_ratio")
        return self.flat("lp_prox") - self.flat("lp_mu")

    def each(self, tokens: torch.Tensor) -> np.ndarray:
        """Return the value that all tokens of a sequence share.  f64[M] -> f64[B]; 1 for a sequence without tokens."""
        values = segment_max(tokens, **self.segments)
        return values.where(torch.isfinite(values), 1.0).numpy()

    def metrics(
        self, token_weights: torch.Tensor | None = None, *, log_ratio: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Return every metric of these tokens."""
        log_ratio = self.log_ratio if log_ratio is None else log_ratio
        applied = torch.ones_like(log_ratio) if token_weights is None else token_weights
        nothing = torch.zeros_like(log_ratio)
        behavior = self.flat("lp_mu") if "lp_mu" in self.inputs else nothing
        totals = diagnostics.token_sums(
            log_ratio=log_ratio,
            weights=applied,
            clipped=nothing,
            entropy=nothing,
            is_fresh=nothing,
            loss=nothing.sum(),
        ) + diagnostics.sequence_sums(
            logprobs=behavior + log_ratio, behavior_logprobs=behavior, weights=applied, **self.segments
        )
        return diagnostics.metrics(totals)

    def sums_of(self, token_weights: torch.Tensor) -> diagnostics.Sums:
        nothing = torch.zeros_like(token_weights)
        return diagnostics.token_sums(
            log_ratio=nothing,
            weights=token_weights,
            clipped=nothing,
            entropy=nothing,
            is_fresh=nothing,
            loss=nothing.sum(),
        ) + diagnostics.sequence_sums(
            logprobs=nothing, behavior_logprobs=nothing, weights=token_weights, **self.segments
        )


def _bounds(params: Params, *, low: float = 0.0, high: float = math.inf) -> dict[str, float]:
    """Return the lower and upper bounds, under any of the vectors' names for them."""

    def first(names: Sequence[str], default: float) -> float:
        return next((float(params[name]) for name in names if params.get(name) is not None), default)

    return {
        "low": first(("low", "lower", "alpha", "C_min", "threshold"), low),
        "high": first(("high", "upper", "beta", "C_max", "C"), high),
    }


# -- corrections -------------------------------------------------------------------------------------------------------


def _factor(
    dense: Ratios, step: Correction, *, log_ratio: torch.Tensor | None = None, **more: torch.Tensor
) -> torch.Tensor:
    """Return the factor by which the correction multiplies each token."""
    log_ratio = dense.log_ratio if log_ratio is None else log_ratio
    given = {"log_ratio": log_ratio, "advantages": torch.zeros_like(log_ratio), **dense.segments, **more}
    return weights((step,), CorrectionInputs(**given))


def _ratios(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {
        "token": dense.back(ratio(dense.log_ratio)),
        "sequence": sequence_ratio(dense.log_ratio, **dense.segments),
        "geometric": geometric_ratio(dense.log_ratio, **dense.segments),
    }


def _tis_token(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, high=2.0)
    step = Clamp(**bounds) if bounds["low"] else TISToken(cap=bounds["high"])
    found = _factor(dense, step)
    outputs: Outputs = {"w": dense.back(found)}
    if isinstance(step, TISToken):
        outputs["clipfrac"] = dense.metrics(found)["offpolicy/truncated_fraction"]
    return outputs


def _tis_seq(params: Params, inputs: Inputs) -> Outputs:
    dense, cap = Ratios(inputs), float(params.get("C", 2.0))
    ratios = sequence_ratio(dense.log_ratio, **dense.segments)
    per_sequence = dense.each(_factor(dense, TISSequence(cap=cap)))
    return {"seq_ratio": ratios, "raw": ratios, "w": per_sequence, f"w_C{cap:g}": per_sequence}


def _icepop(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, low=0.5, high=5.0)
    found = _factor(dense, IcePop(**bounds))
    return {
        "w": dense.back(found),
        "keep": dense.back(_factor(dense, TokenMask(**bounds))),
        "masked_frac": dense.metrics(found)["offpolicy/masked_fraction"],
    }


def _mis_token(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, high=3.0)
    keep = dense.back(_factor(dense, TokenMask(**bounds)))
    return {"w": dense.back(_factor(dense, MISToken(**bounds))), "keep": keep}


def _mis_seq(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, high=3.0)
    keep = dense.each(_factor(dense, SequenceMask(**bounds)))
    return {"w": dense.each(_factor(dense, MISSequence(**bounds))), "keep": keep}


def _geo_mask(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, low=0.999, high=1.001)
    mask = GeoMask(**bounds)
    given = CorrectionInputs(log_ratio=dense.log_ratio, advantages=torch.zeros_like(dense.log_ratio), **dense.segments)
    return {
        "geo": geometric_ratio(dense.log_ratio, **dense.segments),
        "keep": dense.each(_factor(dense, mask)),
        "w": dense.back(weights((TISToken(cap=float(params.get("C") or math.inf)), mask), given)),
    }


def _geo_tis(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {"w": dense.each(_factor(dense, TISGeometric(**_bounds(params))))}


def _veto(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {"keep_seq": dense.each(_factor(dense, Veto(threshold=float(params.get("threshold", 1e-4)))))}


def _outlier(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {"keep_seq": dense.each(_factor(dense, OutlierMask(**_bounds(params, low=1e-4, high=100.0))))}


def _opsm(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    log_ratio = dense.flat("lp_theta") - dense.flat("lp_behaviour")
    step = OPSM(delta=float(params["delta"]))
    kept = _factor(dense, step, log_ratio=log_ratio, advantages=dense.flat("advantages"))
    # If a sequence's advantages are equal, so is its kept fraction; vectors then also give it for masked tokens.
    keep = np.where(dense.mask, dense.back(kept), np.asarray(dense.each(kept))[:, None])
    return {"seq_kl": segment_mean(-log_ratio, **dense.segments), "keep": keep}


def _is_norm(params: Params, inputs: Inputs) -> list[Outputs]:
    """Over tokens or over sequences; both if the vector does not say."""
    levels = [params["level"]] if "level" in params else ["token", "sequence"]
    return [_normed(level, Ratios(inputs), cap=float(params.get("C", math.inf))) for level in levels]


def _normed(level: str, dense: Ratios, *, cap: float) -> Outputs:
    step: Correction = TISSequence(cap=cap) if level == "sequence" else TISToken(cap=cap)
    truncated = _factor(dense, step)
    factor = diagnostics.mean_weight(dense.sums_of(truncated), level=level)
    normed = SelfNorm().formula(truncated, factor)
    return {"factor": factor, "w": dense.each(normed) if level == "sequence" else dense.back(normed)}


def _rejection(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    over, _, statistic = str(params["option"]).rpartition("_")
    if statistic not in ("k1", "k2", "k3") or over not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise NotOffered(f"option {params['option']}")
    low, high = params.get("lower"), params.get("upper")
    if statistic == "k1":  # these bounds apply to a ratio; see KStat
        low, high = math.log(low or 1 / high), math.log(high)
    step = KStat().with_options(
        {
            "statistic": statistic,
            "over": over.removeprefix("seq_"),
            "low": -math.inf if low is None else low,
            "high": math.inf if high is None else high,
        }
    )
    return {"new_mask": dense.back(_factor(dense, step))}


# -- diagnostics -------------------------------------------------------------------------------------------------------


def _ess(params: Params, inputs: Inputs) -> Outputs:
    if "w" in inputs:
        values = torch.tensor(inputs["w"], dtype=torch.float64).ravel()
        sums = diagnostics.token_sums(
            log_ratio=values.log(),
            weights=values,
            clipped=torch.zeros_like(values),
            entropy=torch.zeros_like(values),
            is_fresh=torch.zeros_like(values),
            loss=values.new_zeros(()),
        )
        fraction = diagnostics.metrics(sums)["offpolicy/ess"]
        return {"ess": diagnostics.effective_samples(sums["weight"], sums["weight_squared"]), "ess_frac": fraction}
    metrics = Ratios(inputs).metrics()
    return {"ess": metrics["offpolicy/sequence_ess_count"], "ess_frac": metrics["offpolicy/sequence_ess"]}


_METRICS = {
    "training_ppl": "offpolicy/perplexity_trainer",
    "rollout_ppl": "offpolicy/perplexity_behavior",
    "ppl_ratio": "offpolicy/perplexity_ratio",
    "training_log_ppl": "offpolicy/nll_trainer",
    "rollout_log_ppl": "offpolicy/nll_behavior",
    "log_ppl_diff": "offpolicy/nll_difference",
    "log_ppl_abs_diff": "offpolicy/nll_distance",
    "log_ppl_diff_max": "offpolicy/nll_difference_max",
    "log_ppl_diff_min": "offpolicy/nll_difference_min",
    "kl": "offpolicy/k1",
    "k3_kl": "offpolicy/k3",
    "chi2_token": "offpolicy/chi2_token",
    "chi2_seq": "offpolicy/chi2_sequence",
    "token_mult_prob_error": "mismatch/ratio_error",
    "gen_kl_error": "offpolicy/k3",
    "policy_kl_error": "offpolicy/k3_reverse",
    "js": "offpolicy/js",
    "abs_diff": "mismatch/mean",
    "abs_diff_mean": "mismatch/mean",
    "mean_abs_diff": "mismatch/mean",
    "logprob_abs_diff": "mismatch/mean",
    "train_rollout_logprob_abs_diff": "mismatch/mean",
    "max": "mismatch/max",
    "abs_diff_max": "mismatch/max",
}


def _metrics(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    ours = dense.metrics()
    result: Outputs = {theirs: ours[name] for theirs, name in _METRICS.items()}
    if "lp_theta" in inputs and "lp_mu" in inputs:
        live = dense.metrics(log_ratio=dense.flat("lp_theta") - dense.flat("lp_mu"))
        result["approx_entropy"] = live["offpolicy/entropy"]
    return result


# -- exact bias --------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Chain] = {
    "none": (NoCorrection(),),
    "token_is": (TISToken(cap=math.inf),),
    "token_tis_C2": (TISToken(cap=2.0),),
    "prefix_is": (TISPrefix(cap=math.inf),),
    "seq_is": (TISSequence(cap=math.inf),),
    "seq_tis_C2": (TISSequence(cap=2.0),),
    "seq_tis_C5": (TISSequence(cap=5.0),),
    "icepop_05_5": (IcePop(low=0.5, high=5.0),),
    "icepop_05_2": (IcePop(low=0.5, high=2.0),),
    "geo_weight": (TISGeometric(high=math.inf),),
    "seq_mis_C3": (MISSequence(high=3.0),),
}
"""Maps the oracle's names to chains of asyncrl's corrections."""


REWARDS = {"1 if sum(y)%3==0 else 0": lambda tokens: float(sum(tokens) % 3 == 0)}


def _exact_bias(params: Params, inputs: Inputs) -> Outputs:
    target, behavior_logits = (
        {context: inputs[name][context] for context in inputs["contexts"]} for name in ("logits_theta", "logits_mu")
    )
    if inputs["V"] != len(target[""]):
        raise NotOffered("a vocabulary that differs from the logits'")
    found = enumeration.problem(
        target=target,
        behavior=behavior_logits,
        length=inputs["T"],
        reward=one_of(REWARDS, inputs["reward"]),
        baseline=inputs["baseline"],
    )
    given = CorrectionInputs(
        log_ratio=found.flat_log_ratio,
        sequence=found.flat_sequence,
        num_sequences=len(found.sequences),
        advantages=found.flat_advantages,
    )
    judged = {name: found.judge(weights(steps, given)) for name, steps in ESTIMATORS.items()}
    ratios = sequence_ratio(given.log_ratio, sequence=given.sequence, num_sequences=given.num_sequences).numpy()
    behavior = found.behavior_probabilities
    return {
        "J_theta": found.probabilities @ found.rewards,
        "J_mu": behavior @ found.rewards,
        "exact_grad": found.exact_gradient,
        "estimators": {
            name: {field: getattr(bias, field) for field in enumeration.Bias.__slots__} for name, bias in judged.items()
        },
        "ess_frac_seq": diagnostics.effective_samples(behavior @ ratios, behavior @ ratios**2),
        "kl_mu_theta": -(behavior @ np.log(ratios)),
        "chi2": behavior @ ratios**2 - 1,
    }


FORMULAS: dict[str, Adapter] = {
    "ratios": _ratios,
    "tis_token": _tis_token,
    "tis_seq": _tis_seq,
    "icepop": _icepop,
    "mis_token": _mis_token,
    "mis_seq": _mis_seq,
    "geo_mask": _geo_mask,
    "geo_tis": _geo_tis,
    "veto": _veto,
    "outlier_seq": _outlier,
    "opsm": _opsm,
    "is_norm": _is_norm,
    "verl_rs": _rejection,
    "ess": _ess,
    "metrics": _metrics,
    "exact_bias": _exact_bias,
}
