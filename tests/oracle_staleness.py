"""Oracle vectors of staleness: its statistics and weights, admission, samplers, learning rate. To calls and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.policies import adaptive, admission, diagnostics, prox, samplers, staleness
from tests.oracle_dense import Adapter, Inputs, Outputs, Params, one_of

# -- staleness ---------------------------------------------------------------------------------------------------------


def _ages(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Staleness of each token and which tokens have one: prompts carry version -1."""
    versions = np.asarray(inputs["versions"], np.int64)
    return np.where(versions < 0, 0, int(inputs["current_version"]) - versions), versions >= 0


def _prox(params: Params, inputs: Inputs) -> Outputs:
    ages, _ = _ages(inputs)
    live, behavior = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("lp_theta", "lp_mu"))
    return {
        "alpha": prox.prox_share(ages, dtype=torch.float64),
        "loglinear": prox.loglinear_prox(live, behavior, staleness=ages),
        "linear": prox.linear_prox(live, behavior, staleness=ages),
    }


def _staleness(params: Params, inputs: Inputs) -> Outputs:
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


def _staleness_weight(params: Params, inputs: Inputs) -> Outputs:
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


def _prime(params: Params, inputs: Inputs) -> Outputs:
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


def _areal(params: Params, inputs: Inputs) -> Outputs:
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


def _areal_floor(params: Params, inputs: Inputs) -> Outputs:
    names = {"N_r": "published", "B": "groups_per_batch", "i": "step", "eta": "max_staleness"}
    columns = [one_of(names, name) for name in inputs["cols"]]
    return {"ok": [admission.areal_admits(**dict(zip(columns, row, strict=True))) for row in inputs["rows"]]}


def _skyrl(params: Params, inputs: Inputs) -> Outputs:
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


def _verl(params: Params, inputs: Inputs) -> Outputs:
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


def _gate(params: Params, inputs: Inputs) -> Outputs:
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


def _windowed(params: Params, inputs: Inputs) -> Outputs:
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


def _weight_fifo(params: Params, inputs: Inputs) -> Outputs:
    young = samplers.eligible(
        _ready(inputs), policy_version=inputs["train_weight"], max_staleness=inputs["max_staleness"]
    )

    def selected(at_least: int) -> list[int] | None:
        keys = samplers.oldest_version_only(young, at_least=at_least, at_most=inputs["max_groups"])
        return None if keys is None else [group_id for _, group_id in keys]

    return {"selected": selected(inputs["min_groups"]), **{f"selected_min{n}": selected(n) for n in range(1, 5)}}


def _group_complete(params: Params, inputs: Inputs) -> Outputs:
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


def _vcpo(params: Params, inputs: Inputs) -> Outputs:
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


FORMULAS: dict[str, Adapter] = {
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
}
