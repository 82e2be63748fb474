"""From the oracles' words to our functions: corrections, diagnostics and staleness control.

FORMULAS maps a vector's ``formula`` to a function of its params and inputs that gives every name it may expect. What
is dense [B, T] with a mask there is flat here. No formulas of our own: only names, shapes and defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.policies import adaptive, admission, corrections, diagnostics, prox, samplers, staleness
from asyncrl.policies.correction_chains import Evidence, chain, weights
from asyncrl.policies.segments import segment_max, segment_mean
from tests import enumeration

Params = Mapping[str, Any]
Inputs = Mapping[str, Any]
Expected = dict[str, Any]


class Dense:
    """The [B, T] arrays of a vector as M flat tokens of S = B sequences, and results put back."""

    def __init__(self, inputs: Inputs) -> None:
        shape_of = next(inputs[name] for name in ("log_ratio", "lp_prox", "lp_theta", "lp_behaviour") if name in inputs)
        dense = np.atleast_2d(np.asarray(shape_of, np.float64))
        self.mask = np.atleast_2d(np.asarray(inputs.get("mask", np.ones(dense.shape)))) > 0
        self.sequence = torch.from_numpy(np.nonzero(self.mask)[0])
        self.num_sequences = len(dense)
        self.inputs = inputs

    @property
    def segments(self) -> dict[str, Any]:
        return {"sequence": self.sequence, "num_sequences": self.num_sequences}

    @property
    def log_ratio(self) -> torch.Tensor:
        if "log_ratio" in self.inputs:
            return self.flat("log_ratio")
        return self.flat("lp_prox") - self.flat("lp_mu")

    def flat(self, name: str) -> torch.Tensor:
        values = np.asarray(self.inputs[name], np.float64)
        return torch.from_numpy(np.broadcast_to(values, self.mask.shape)[self.mask])

    def back(self, tokens: torch.Tensor) -> np.ndarray:
        """f64[M] -> f64[B, T], 0 at masked positions."""
        result = np.zeros(self.mask.shape)
        result[self.mask] = tokens.double().numpy()
        return result

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


def _ratios(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    return {
        "token": dense.back(corrections.ratio(dense.log_ratio)),
        "sequence": corrections.sequence_ratio(dense.log_ratio, **dense.segments),
        "geometric": corrections.geometric_ratio(dense.log_ratio, **dense.segments),
    }


def _tis_token(params: Params, inputs: Inputs) -> Expected:
    dense, bounds = Dense(inputs), _bounds(params, high=2.0)
    if bounds["low"]:
        return {"w": dense.back(corrections.clamp(dense.log_ratio, **bounds))}
    is_cut = corrections.is_truncated(dense.log_ratio, cap=bounds["high"])
    return {
        "w": dense.back(corrections.tis_token(dense.log_ratio, cap=bounds["high"])),
        "clipfrac": is_cut.double().mean(),
    }


def _tis_seq(params: Params, inputs: Inputs) -> Expected:
    dense, cap = Dense(inputs), float(params.get("C", 2.0))
    ratios = corrections.sequence_ratio(dense.log_ratio, **dense.segments)
    token_weights = corrections.tis_sequence(dense.log_ratio, cap=cap, **dense.segments)
    per_sequence = dense.each(token_weights)
    return {"seq_ratio": ratios, "raw": ratios, "w": per_sequence, f"w_C{cap:g}": per_sequence}


def _icepop(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    token_weights = corrections.icepop(dense.log_ratio, **_bounds(params, low=0.5, high=5.0))
    return {
        "w": dense.back(token_weights),
        "keep": dense.back(token_weights != 0),
        "masked_frac": dense.metrics(token_weights)["offpolicy/masked_fraction"],
    }


def _mis_token(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    token_weights = corrections.mis_token(dense.log_ratio, **_bounds(params, high=3.0))
    return {"w": dense.back(token_weights), "keep": dense.back(token_weights != 0)}


def _mis_seq(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    token_weights = corrections.mis_sequence(dense.log_ratio, **_bounds(params, high=3.0), **dense.segments)
    return {"w": dense.each(token_weights), "keep": dense.each((token_weights != 0).double())}


def _evidence(dense: Dense) -> Evidence:
    return Evidence(log_ratio=dense.log_ratio, advantages=torch.zeros_like(dense.log_ratio), **dense.segments)


def _geo_mask(params: Params, inputs: Inputs) -> Expected:
    dense, bounds = Dense(inputs), _bounds(params, low=0.999, high=1.001)
    cap = float(params.get("C") or math.inf)
    steps = chain([{"name": "tis_token", "cap": cap}, {"name": "geo_mask", **bounds}])
    return {
        "geo": corrections.geometric_ratio(dense.log_ratio, **dense.segments),
        "keep": dense.each(corrections.geo_mask(dense.log_ratio, **bounds, **dense.segments)),
        "w": dense.back(weights(steps, _evidence(dense))),
    }


def _geo_tis(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    return {"w": dense.each(corrections.tis_geometric(dense.log_ratio, **_bounds(params), **dense.segments))}


def _veto(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    kept = corrections.veto(dense.log_ratio, threshold=float(params.get("threshold", 1e-4)), **dense.segments)
    return {"keep_seq": dense.each(kept)}


def _outlier(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    kept = corrections.outlier_mask(dense.log_ratio, **_bounds(params, low=1e-4, high=100.0), **dense.segments)
    return {"keep_seq": dense.each(kept)}


def _opsm(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    log_ratio = dense.flat("lp_theta") - dense.flat("lp_behaviour")
    kept = corrections.opsm(
        log_ratio, advantages=dense.flat("advantages"), delta=float(params["delta"]), **dense.segments
    )
    # Where a sequence's advantages are alike, so is what is kept of it, and the vectors say so of masked tokens too.
    keep = np.where(dense.mask, dense.back(kept), np.asarray(dense.each(kept))[:, None])
    return {"seq_kl": segment_mean(-log_ratio, **dense.segments), "keep": keep}


def _is_norm(params: Params, inputs: Inputs) -> Expected:
    """The vectors say the level in their id alone."""
    dense, cap = Dense(inputs), float(params.get("C", math.inf))
    if "seq" in params["id"]:
        level, back = "sequence", dense.each
        truncated = corrections.tis_sequence(dense.log_ratio, cap=cap, **dense.segments)
    else:
        level, back = "token", dense.back
        truncated = corrections.tis_token(dense.log_ratio, cap=cap)
    factor = diagnostics.mean_weight(dense.sums_of(truncated), level=level)
    return {"factor": factor, "w": back(corrections.self_norm(truncated, mean_weight=factor))}


def _rejection(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    over, statistic = str(params["option"]).rsplit("_", 1)
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


def _ess(params: Params, inputs: Inputs) -> Expected:
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
    metrics = Dense(inputs).metrics()
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


def _metrics(params: Params, inputs: Inputs) -> Expected:
    dense = Dense(inputs)
    ours = dense.metrics()
    result: Expected = {theirs: ours[name] for theirs, name in _METRICS.items()}
    if "lp_theta" in inputs and "lp_mu" in inputs:
        entropies = diagnostics.importance_entropy(dense.flat("lp_theta"), dense.flat("lp_mu"))
        result["approx_entropy"] = entropies.mean()
    return result


# -- staleness ---------------------------------------------------------------------------------------------------------


def _ages(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Staleness of each token and which tokens have one: prompts carry version -1."""
    versions = np.asarray(inputs["versions"], np.int64)
    return np.where(versions < 0, 0, int(inputs["current_version"]) - versions), versions >= 0


def _prox(params: Params, inputs: Inputs) -> Expected:
    ages, _ = _ages(inputs)
    live, behavior = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("lp_theta", "lp_mu"))
    return {
        "alpha": prox.prox_share(ages, dtype=torch.float64),
        "loglinear": prox.loglinear_prox(live, behavior, staleness=ages),
        "linear": prox.linear_prox(live, behavior, staleness=ages),
    }


def _staleness(params: Params, inputs: Inputs) -> Expected:
    ages, is_sampled = _ages(inputs)
    sequence = np.nonzero(is_sampled)[0]
    found = staleness.statistics(ages[is_sampled], sequence, num_sequences=len(ages))
    before_step = staleness.statistics(ages[is_sampled] - 1, sequence, num_sequences=len(ages))
    return {
        "theta_avg": found.mean,
        "theta_max": found.largest,
        "theta_min": found.smallest,
        "prox_avg": before_step.mean,
        "prox_max": before_step.largest,
        "prox_min": before_step.smallest,
        "seq_oldest": found.oldest,
        "seq_newest": found.newest,
        "group_oldest": found.largest,
        "span": found.spread,
    }


def _staleness_weight(params: Params, inputs: Inputs) -> Expected:
    ages, rate, bound = inputs["staleness"], float(params.get("lam", 0.2)), int(params.get("eta", 8))
    exponential = staleness.exponential_weight(ages, rate=rate)
    linear = staleness.linear_weight(ages, max_staleness=bound)
    return {
        "exp": exponential,
        f"exp_{rate:g}".replace(".", ""): exponential,
        "inv": staleness.inverse_weight(ages),
        "linear": linear,
        f"linear_eta{bound}": linear,
    }


def _prime(params: Params, inputs: Inputs) -> Expected:
    bound = int(inputs.get("max_off_policy_steps", params.get("max_off_policy_steps", 8)))
    lags = [staleness.lag(policy_version=row["step"] - 1, start=row["start"], end=row["end"]) for row in inputs["rows"]]
    return {
        "total": [lag.total for lag in lags],
        "in_flight": [lag.in_flight for lag in lags],
        "in_queue": [lag.in_queue for lag in lags],
        "keep": [
            not staleness.is_stale(row["start"], policy_version=row["step"] - 1, max_staleness=bound)
            for row in inputs["rows"]
        ],
    }


# -- admission ---------------------------------------------------------------------------------------------------------


def _areal(params: Params, inputs: Inputs) -> Expected:
    capacities = [
        admission.areal_capacity(
            version=row["version"],
            groups_per_batch=row["batch"],
            max_staleness=row["eta"],
            accepted=row["accepted"],
            running=row["running"],
            max_running=row["max_concurrent"],
        )
        for row in inputs["rows"]
    ]
    return {"capacity": capacities, "submit_allowed": [capacity > 0 for capacity in capacities]}


def _areal_floor(params: Params, inputs: Inputs) -> Expected:
    names = {"N_r": "published", "B": "groups_per_batch", "i": "step", "eta": "max_staleness"}
    columns = [names[name] for name in inputs["cols"]]
    return {"ok": [admission.areal_admits(**dict(zip(columns, row, strict=True))) for row in inputs["rows"]]}


def _skyrl(params: Params, inputs: Inputs) -> Expected:
    return {
        "capacity": [
            admission.skyrl_capacity(
                step=row["global_step"],
                groups_per_batch=row["B"],
                max_staleness=row["S"],
                accepted=row["accepted"] - row.get("then_filter", 0),
                running=row["running"],
                max_running=row["max_concurrent"],
            )
            for row in inputs["rows"]
        ]
    }


def _verl(params: Params, inputs: Inputs) -> Expected:
    capacities = [
        admission.verl_capacity(
            samples_per_step=row["required"], steps_per_sync=row["sync"], threshold=row["threshold"]
        )
        for row in inputs["rows"]
    ]
    return {
        "max_required": capacities,
        "remaining_after_sync": [
            admission.verl_remaining(capacity=capacity, active=row["active"], queued=row["queued"])
            for capacity, row in zip(capacities, inputs["rows"], strict=True)
        ],
    }


def _gate(params: Params, inputs: Inputs) -> Expected:
    dispatched = 0
    while admission.nemo_admits(
        dispatched_batches=dispatched, trainer_version=inputs["trainer_version"], window=inputs["window"]
    ):
        dispatched += 1
    return {
        "batches_admitted_before_block": dispatched,
        **{f"required_capacity_groups_per_step_{size}": dispatched * size for size in (1, 2, 4, 8, 16, 32, 64)},
    }


# -- samplers ----------------------------------------------------------------------------------------------------------


def _ready(inputs: Inputs) -> list[samplers.Key]:
    pairs = zip(inputs["start_weight"], inputs["ready"], strict=True)
    return [(version, index) for index, (version, is_ready) in enumerate(pairs) if is_ready]


def _windowed(params: Params, inputs: Inputs) -> Expected:
    ready = _ready(inputs)
    young = samplers.eligible(ready, policy_version=inputs["train_weight"], max_staleness=inputs["max_staleness"])
    count = min(len(young), inputs["max_groups"])

    def ids(keys: Sequence[samplers.Key] | None) -> list[int]:
        return [group_id for _, group_id in keys or ()]

    return {
        "fifo": ids(samplers.select(young, count=count, order=samplers.in_order)),
        "freshest_first": ids(samplers.select(young, count=count, order=samplers.freshest_first)),
        "evicted": ids([key for key in ready if key not in young]),
        "eligible": ids(young),
    }


def _weight_fifo(params: Params, inputs: Inputs) -> Expected:
    young = samplers.eligible(
        _ready(inputs), policy_version=inputs["train_weight"], max_staleness=inputs["max_staleness"]
    )

    def selected(at_least: int) -> list[int] | None:
        keys = samplers.oldest_version_only(young, at_least=at_least, at_most=inputs["max_groups"])
        return None if keys is None else [group_id for _, group_id in keys]

    return {"selected": selected(inputs["min_groups"]), **{f"selected_min{n}": selected(n) for n in range(1, 5)}}


def _group_complete(params: Params, inputs: Inputs) -> Expected:
    return {
        "action": [
            samplers.group_action(
                group["versions"],
                group["done"],
                group_size=inputs["G"],
                policy_version=inputs["current"],
                max_staleness=inputs["max_staleness"],
            )
            for group in inputs["groups"]
        ]
    }


def _vcpo(params: Params, inputs: Inputs) -> Expected:
    ratios, rate = torch.tensor(inputs["seq_is"], dtype=torch.float64), float(inputs["base_lr"])
    sequences = torch.arange(len(ratios))

    def fraction(values: torch.Tensor) -> tuple[float, float]:
        sums = diagnostics.sequence_sums(
            logprobs=values.log(),
            behavior_logprobs=torch.zeros_like(values),
            weights=values,
            sequence=sequences,
            num_sequences=len(values),
        )
        count = diagnostics.effective_samples(sums["sequence_ratio"], sums["sequence_ratio_squared"])
        return count, count / len(values)

    count, share = fraction(ratios)
    _, clipped_share = fraction(ratios.clamp(max=float(inputs.get("seq_is_threshold", 2.0))))
    scaled = adaptive.vcpo_learning_rate
    return {
        "ess": count,
        "ess_ratio": share,
        "ess_ratio_clipped": clipped_share,
        "lr": scaled(
            rate,
            ess_fraction=share,
            base_ess_fraction=float(params.get("base_ess_ratio", 1.0)),
            rule=str(params.get("rule", "sqrt")),
        ),
        "lr_sqrt_base1": scaled(rate, ess_fraction=share),
        "lr_linear_base1": scaled(rate, ess_fraction=share, rule="linear"),
        "lr_sqrt_base05": scaled(rate, ess_fraction=share, base_ess_fraction=0.5),
        "lr_sqrt_base1_clipped": scaled(rate, ess_fraction=clipped_share),
    }


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


def _exact_bias(params: Params, inputs: Inputs) -> Expected:
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


FORMULAS: dict[str, Callable[[Params, Inputs], Expected]] = {
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
    "prox_approx": _prox,
    "staleness": _staleness,
    "staleness_weight": _staleness_weight,
    "prime_staleness": _prime,
    "areal_capacity": _areal,
    "areal_floor": _areal_floor,
    "skyrl_capacity": _skyrl,
    "verl_admission": _verl,
    "nemo_gate": _gate,
    "nemo_windowed": _windowed,
    "nemo_fifo": _weight_fifo,
    "group_complete": _group_complete,
    "vcpo_lr": _vcpo,
    "exact_bias": _exact_bias,
}
