"""Converts oracle vectors of staleness to calls and back: statistics and weights, admission, order, learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.policies import learning_rate
from asyncrl.policies.corrections import diagnostics
from asyncrl.policies.groups import selection
from asyncrl.policies.staleness import staleness
from asyncrl.policies.staleness.admission import Admission
from tests.oracles.dense import Adapter, Inputs, Outputs, Params, one_of

# -- staleness ---------------------------------------------------------------------------------------------------------


def _ages(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the staleness of each token, and which tokens have one: prompts carry version -1."""
    versions = np.asarray(inputs["versions"], np.int64)
    return np.where(versions < 0, 0, int(inputs["current_version"]) - versions), versions >= 0


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


def _published(*, window: int, batch: int, steps: int, published: int) -> int:
    """Return how many more groups an asynchronous run without an end may publish."""
    rule = Admission(mode="async", groups_per_batch=batch, max_staleness=window, total_groups=10**9)
    return rule.may_publish(published=published, lost=0, batches_taken=steps, steps_done=steps)


def _areal_floor(params: Params, inputs: Inputs) -> Outputs:
    names = {"N_r": "published", "B": "batch", "i": "steps", "eta": "window"}
    columns = [one_of(names, name) for name in inputs["cols"]]
    rows = [dict(zip(columns, row, strict=True)) for row in inputs["rows"]]
    return {"ok": [_published(**{**row, "published": row["published"] - 1}) > 0 for row in rows]}


def _gate(params: Params, inputs: Inputs) -> Outputs:
    """Count batches; for names that state a number of groups per step, count groups in batches of that size."""
    window, steps = inputs["window"], inputs["trainer_version"]
    sizes = (1, 2, 4, 8, 16, 32, 64)
    return {
        "batches_admitted_before_block": _published(window=window, batch=1, steps=steps, published=0),
        **{
            f"required_capacity_groups_per_step_{size}": _published(window=window, batch=size, steps=steps, published=0)
            for size in sizes
        },
    }


# -- order -------------------------------------------------------------------------------------------------------------


def _ready(inputs: Inputs) -> list[selection.Key]:
    pairs = zip(inputs["start_weight"], inputs["ready"], strict=True)
    return [(version, index) for index, (version, is_ready) in enumerate(pairs) if is_ready]


def _windowed(params: Params, inputs: Inputs) -> Outputs:
    ready = _ready(inputs)
    version, bound = inputs["train_weight"], inputs["max_staleness"]
    young = [key for key in ready if not staleness.is_stale(key[0], policy_version=version, max_staleness=bound)]
    count = min(len(young), inputs["max_groups"])

    def ids(keys: Sequence[selection.Key] | None) -> list[int]:
        return [group_id for _, group_id in keys or ()]

    return {
        "fifo": ids(selection.select(young, count=count, order=selection.in_order)),
        "freshest_first": ids(selection.select(young, count=count, order=selection.freshest_first)),
        "evicted": ids([key for key in ready if key not in young]),
        "eligible": ids(young),
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
    scaled = learning_rate.vcpo_learning_rate
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
    "staleness": _staleness,
    "staleness_weight": _staleness_weight,
    "prime_staleness": _prime,
    "areal_floor": _areal_floor,
    "nemo_gate": _gate,
    "nemo_windowed": _windowed,
    "vcpo_lr": _vcpo,
}
