"""Chains of corrections: "tis_token + geo_mask + veto" is the product of a weight and two masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.component import named
from asyncrl.policies.corrections.correction import Correction, CorrectionInputs
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.corrections.weights import NoCorrection

Chain = tuple[Correction, ...]


def chain(spec: str | Sequence[Correction]) -> Chain:
    """Return the corrections that ``spec`` names, joined by "+", with their defaults; or the corrections it contains.

    Raises ConfigError for an unknown name, and for an invalid chain with the reason.
    """
    if isinstance(spec, str):
        spec = [named(name.strip(), Correction, CORRECTIONS, where="correction") for name in spec.split("+")]
    _refuse_wrong_chains(spec)
    return tuple(spec)


def weights(steps: Chain, inputs: CorrectionInputs) -> torch.Tensor:
    """Return the product of the chain's factors, without gradient; 0 for rejected tokens.  -> f32[M]"""
    result = NoCorrection().formula(inputs.log_ratio)
    for step in steps:
        result = step.apply(result, inputs)
    return result


def norm_level(steps: Chain) -> str | None:
    """Return what self_norm averages the weights over (``diagnostics.mean_weight``); None for a chain without it."""
    if all(step.kind != "norm" for step in steps):
        return None
    return "sequence" if any(step.level == "sequence" for step in steps) else "token"


LEFT_BEHIND: Final = 0.1
"""Ratio of a token that the policy has left behind: the policy samples it ten times less often than its sampler did."""


def weight_left_behind(steps: Chain) -> float:
    """Return the weight of a token with ratio ``LEFT_BEHIND`` and negative advantage; a fresh token has weight 1."""
    token = torch.zeros(1, dtype=torch.int64)
    ratio = torch.full((1,), LEFT_BEHIND)
    inputs = CorrectionInputs(
        log_ratio=ratio.log(),
        sequence=token,
        num_sequences=1,
        advantages=-torch.ones(1),
        behavior_logprobs=-torch.ones(1),
        mean_weight=1.0,
    )
    return float(weights(steps, inputs))


def is_uncorrected(steps: Chain) -> bool:
    """Return whether stale data would be trained as if it were fresh, whatever the corrections are called.

    The test is by effect, on tokens that the policy has left behind, because stale training keeps pushing those. A
    weight reduces such a token to about its ratio, and a mask that bounds the ratio rejects it. A chain that weights
    the token over a half (``veto`` at 1e-4, a ``k_stat`` with huge bounds) corrects nothing. The advantage is negative
    because ``opsm`` acts only then.
    """
    return weight_left_behind(steps) > 0.5


def ratios(steps: Sequence[Correction]) -> list[str]:
    """Return the names of the corrections that weight by the ratio to the behavior policy."""
    return [step.name for step in steps if step.kind == "weight" and not isinstance(step, NoCorrection)]


def _refuse_wrong_chains(steps: Sequence[Correction]) -> None:
    if not steps:
        raise ConfigError('algorithm: correction is empty; "none" trains without one')
    names = [step.name for step in steps]
    if len(ratios(steps)) > 1:
        raise ConfigError(
            f"algorithm: correction {' + '.join(names)} weights with the ratio twice: {', '.join(ratios(steps))}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"algorithm: correction {' + '.join(names)} names one correction twice")
    if any(step.kind == "norm" for step in steps[:-1]):
        raise ConfigError("algorithm: correction self_norm must come last: what follows it would change the mean again")
