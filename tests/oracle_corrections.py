"""Oracle vectors of corrections, their diagnostics and their exact bias: to calls and back.

FORMULAS maps a vector's ``formula`` to a function of its params and inputs that gives every name it may expect. What
is dense [B, T] with a mask there is flat here. No formulas of our own: only names, shapes and defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.policies import corrections, diagnostics
from asyncrl.policies.correction_chains import Evidence, chain, weights
from asyncrl.policies.segments import segment_max, segment_mean
from tests import enumeration
from tests.oracle_dense import Adapter, Dense, Inputs, NotOffered, Outputs, Params


class Ratios(Dense):
    """What corrections and diagnostics look at, of a vector that has log ratios or the logprobs they are made of."""

    def __init__(self, inputs: Inputs) -> None:
        names = ("log_ratio", "lp_prox", "lp_theta", "lp_behaviour")
        super().__init__(inputs, like=next((name for name in names if name in inputs), names[0]))

    @property
    def log_ratio(self) -> torch.Tensor:
        if "log_ratio" in self.inputs:
            return self.flat("log_ratio")
        return self.flat("lp_prox") - self.flat("lp_mu")

    def each(self, tokens: torch.Tensor) -> np.ndarray:
        """What all tokens of a sequence carry alike.  f64[M] -> f64[B]; 1 for a sequence without tokens."""
        values = segment_max(tokens, **self.segments)
        return values.where(torch.isfinite(values), 1.0).numpy()

    def metrics(self, token_weights: torch.Tensor | None = None) -> dict[str, float]:
        """Every metric of these tokens."""
        log_ratio = self.log_ratio
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
    """The words for a lower and an upper bound that the vectors use."""

    def first(names: Sequence[str], default: float) -> float:
        return next((float(params[name]) for name in names if params.get(name) is not None), default)

    return {
        "low": first(("low", "lower", "alpha", "C_min", "threshold"), low),
        "high": first(("high", "upper", "beta", "C_max", "C"), high),
    }


# -- corrections -------------------------------------------------------------------------------------------------------


def _ratios(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {
        "token": dense.back(corrections.ratio(dense.log_ratio)),
        "sequence": corrections.sequence_ratio(dense.log_ratio, **dense.segments),
        "geometric": corrections.geometric_ratio(dense.log_ratio, **dense.segments),
    }


def _tis_token(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, high=2.0)
    if bounds["low"]:
        return {"w": dense.back(corrections.clamp(dense.log_ratio, **bounds))}
    is_cut = corrections.is_truncated(dense.log_ratio, cap=bounds["high"])
    return {
        "w": dense.back(corrections.tis_token(dense.log_ratio, cap=bounds["high"])),
        "clipfrac": is_cut.double().mean(),
    }


def _tis_seq(params: Params, inputs: Inputs) -> Outputs:
    dense, cap = Ratios(inputs), float(params.get("C", 2.0))
    ratios = corrections.sequence_ratio(dense.log_ratio, **dense.segments)
    token_weights = corrections.tis_sequence(dense.log_ratio, cap=cap, **dense.segments)
    per_sequence = dense.each(token_weights)
    return {"seq_ratio": ratios, "raw": ratios, "w": per_sequence, f"w_C{cap:g}": per_sequence}


def _icepop(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    token_weights = corrections.icepop(dense.log_ratio, **_bounds(params, low=0.5, high=5.0))
    return {
        "w": dense.back(token_weights),
        "keep": dense.back(token_weights != 0),
        "masked_frac": dense.metrics(token_weights)["offpolicy/masked_fraction"],
    }


def _mis_token(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    token_weights = corrections.mis_token(dense.log_ratio, **_bounds(params, high=3.0))
    return {"w": dense.back(token_weights), "keep": dense.back(token_weights != 0)}


def _mis_seq(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    token_weights = corrections.mis_sequence(dense.log_ratio, **_bounds(params, high=3.0), **dense.segments)
    return {"w": dense.each(token_weights), "keep": dense.each((token_weights != 0).double())}


def _evidence(dense: Ratios) -> Evidence:
    return Evidence(log_ratio=dense.log_ratio, advantages=torch.zeros_like(dense.log_ratio), **dense.segments)


def _geo_mask(params: Params, inputs: Inputs) -> Outputs:
    dense, bounds = Ratios(inputs), _bounds(params, low=0.999, high=1.001)
    cap = float(params.get("C") or math.inf)
    steps = chain([{"name": "tis_token", "cap": cap}, {"name": "geo_mask", **bounds}])
    return {
        "geo": corrections.geometric_ratio(dense.log_ratio, **dense.segments),
        "keep": dense.each(corrections.geo_mask(dense.log_ratio, **bounds, **dense.segments)),
        "w": dense.back(weights(steps, _evidence(dense))),
    }


def _geo_tis(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    return {"w": dense.each(corrections.tis_geometric(dense.log_ratio, **_bounds(params), **dense.segments))}


def _veto(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    kept = corrections.veto(dense.log_ratio, threshold=float(params.get("threshold", 1e-4)), **dense.segments)
    return {"keep_seq": dense.each(kept)}


def _outlier(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    kept = corrections.outlier_mask(dense.log_ratio, **_bounds(params, low=1e-4, high=100.0), **dense.segments)
    return {"keep_seq": dense.each(kept)}


def _opsm(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    log_ratio = dense.flat("lp_theta") - dense.flat("lp_behaviour")
    kept = corrections.opsm(
        log_ratio, advantages=dense.flat("advantages"), delta=float(params["delta"]), **dense.segments
    )
    # Where a sequence's advantages are alike, so is what is kept of it, and the vectors say so of masked tokens too.
    keep = np.where(dense.mask, dense.back(kept), np.asarray(dense.each(kept))[:, None])
    return {"seq_kl": segment_mean(-log_ratio, **dense.segments), "keep": keep}


def _is_norm(params: Params, inputs: Inputs) -> list[Outputs]:
    """Over tokens or over sequences; either where the vector does not say."""
    levels = [params["level"]] if "level" in params else ["token", "sequence"]
    return [_normed(level, Ratios(inputs), cap=float(params.get("C", math.inf))) for level in levels]


def _normed(level: str, dense: Ratios, *, cap: float) -> Outputs:
    back: Callable[[torch.Tensor], Any]
    if level == "sequence":
        back = dense.each
        truncated = corrections.tis_sequence(dense.log_ratio, cap=cap, **dense.segments)
    else:
        back = dense.back
        truncated = corrections.tis_token(dense.log_ratio, cap=cap)
    factor = diagnostics.mean_weight(dense.sums_of(truncated), level=level)
    return {"factor": factor, "w": back(corrections.self_norm(truncated, mean_weight=factor))}


def _rejection(params: Params, inputs: Inputs) -> Outputs:
    dense = Ratios(inputs)
    over, _, statistic = str(params["option"]).rpartition("_")
    if statistic not in ("k1", "k2", "k3"):
        raise NotOffered(f"option {params['option']}")
    low, high = params.get("lower"), params.get("upper")
    if statistic == "k1":  # these bounds are of a ratio; see k_stat
        low, high = math.log(low or 1 / high), math.log(high)
    kept = corrections.k_stat(
        dense.log_ratio,
        statistic=statistic,
        over=over.removeprefix("seq_"),
        low=-math.inf if low is None else low,
        high=math.inf if high is None else high,
        **dense.segments,
    )
    return {"new_mask": dense.back(kept)}


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
        entropies = diagnostics.importance_entropy(dense.flat("lp_theta"), dense.flat("lp_mu"))
        result["approx_entropy"] = entropies.mean()
    return result


# -- exact bias --------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, list[dict[str, Any]]] = {
    "none": [{"name": "none"}],
    "token_is": [{"name": "tis_token", "cap": math.inf}],
    "token_tis_C2": [{"name": "tis_token", "cap": 2.0}],
    "prefix_is": [{"name": "tis_prefix", "cap": math.inf}],
    "seq_is": [{"name": "tis_sequence", "cap": math.inf}],
    "seq_tis_C2": [{"name": "tis_sequence", "cap": 2.0}],
    "seq_tis_C5": [{"name": "tis_sequence", "cap": 5.0}],
    "icepop_05_5": [{"name": "icepop", "low": 0.5, "high": 5.0}],
    "icepop_05_2": [{"name": "icepop", "low": 0.5, "high": 2.0}],
    "geo_weight": [{"name": "tis_geometric", "high": math.inf}],
    "seq_mis_C3": [{"name": "mis_sequence", "high": 3.0}],
}
"""The oracle's names as chains of ours."""


def _exact_bias(params: Params, inputs: Inputs) -> Outputs:
    found = enumeration.problem(
        target=inputs["logits_theta"],
        behavior=inputs["logits_mu"],
        length=inputs["T"],
        reward=lambda tokens: float(sum(tokens) % 3 == 0),
        baseline=inputs["baseline"],
    )
    evidence = Evidence(
        log_ratio=found.flat_log_ratio,
        sequence=found.flat_sequence,
        num_sequences=len(found.sequences),
        advantages=found.flat_advantages,
    )
    judged = {name: found.judge(weights(chain(spec), evidence)) for name, spec in ESTIMATORS.items()}
    ratios = corrections.sequence_ratio(
        evidence.log_ratio, sequence=evidence.sequence, num_sequences=evidence.num_sequences
    ).numpy()
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
