"""Corrections composed by name: "tis_token + geo_mask + veto" is the product of a weight and two masks.

CORRECTIONS is the table. A run file names one row, or several joined by " + ", and sets their options in
[algorithm.options]; ``chain`` also takes a list: ["tis_token", {"name": "geo_mask", "low": 0.9, "high": 1.1}].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncrl.errors import ConfigError
from asyncrl.policies import corrections
from asyncrl.policies.segments import Array

Spec = str | Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What corrections may look at: M tokens of S sequences, as in segments.py.

    log_ratio    f32[M]  proximal - behavior logprobs
    sequence     i64[M]  which sequence a token belongs to;  num_sequences  S
    advantages   f32[M]
    mean_weight  of the whole batch, for self_norm alone; 1.0 when the caller divides the summed gradients by it
    """

    log_ratio: Array
    sequence: Array
    num_sequences: int
    advantages: Array
    mean_weight: float | torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row: a pure function of the log ratios, what else of the evidence it needs, and its options' defaults.

    kind   "weight" (a ratio, of which a chain has at most one), "mask" (0 and 1) or "norm" (of the weights before it)
    level  of a weight: "token", or "sequence" where all tokens of a sequence carry the same
    """

    name: str
    kind: str
    function: Callable[..., torch.Tensor]
    needs: tuple[str, ...] = ()
    level: str = "token"
    options: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, weights: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """``weights`` with this row's factor.  f32[M] -> f32[M].  Raises ValueError when evidence is missing."""
        needed = {name: getattr(evidence, name) for name in self.needs}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise ValueError(f"correction {self.name} needs {', '.join(missing)} of the whole batch")
        if self.kind == "norm":
            return self.function(weights, **needed)
        return weights * self.function(evidence.log_ratio, **needed, **self.options)


Chain = tuple[Step, ...]

_SEQUENCE = ("sequence", "num_sequences")

CORRECTIONS: dict[str, Step] = {
    row.name: row
    for row in (
        Step(name="none", kind="weight", function=corrections.none),
        Step(name="tis_token", kind="weight", function=corrections.tis_token, options={"cap": 2.0}),
        Step(name="clamp", kind="weight", function=corrections.clamp, options={"low": 0.5, "high": 5.0}),
        Step(
            name="tis_sequence",
            kind="weight",
            function=corrections.tis_sequence,
            needs=_SEQUENCE,
            level="sequence",
            options={"cap": 2.0},
        ),
        Step(
            name="tis_geometric",
            kind="weight",
            function=corrections.tis_geometric,
            needs=_SEQUENCE,
            level="sequence",
            options={"low": 0.0, "high": 2.0},
        ),
        Step(name="tis_prefix", kind="weight", function=corrections.tis_prefix, needs=_SEQUENCE, options={"cap": 2.0}),
        Step(name="mis_token", kind="weight", function=corrections.mis_token, options={"low": 0.0, "high": 3.0}),
        Step(
            name="mis_sequence",
            kind="weight",
            function=corrections.mis_sequence,
            needs=_SEQUENCE,
            level="sequence",
            options={"low": 0.0, "high": 3.0},
        ),
        Step(name="icepop", kind="weight", function=corrections.icepop, options={"low": 0.5, "high": 5.0}),
        Step(
            name="geo_mask",
            kind="mask",
            function=corrections.geo_mask,
            needs=_SEQUENCE,
            options={"low": 0.99, "high": 1.01},
        ),
        Step(name="veto", kind="mask", function=corrections.veto, needs=_SEQUENCE, options={"threshold": 1e-4}),
        Step(
            name="outlier_mask",
            kind="mask",
            function=corrections.outlier_mask,
            needs=_SEQUENCE,
            options={"low": 1e-4, "high": 100.0},
        ),
        Step(
            name="opsm",
            kind="mask",
            function=corrections.opsm,
            needs=("advantages", *_SEQUENCE),
            options={"delta": 0.5},
        ),
        Step(
            name="k_stat",
            kind="mask",
            function=corrections.k_stat,
            needs=_SEQUENCE,
            options={"statistic": "k3", "over": "mean", "low": float("-inf"), "high": 0.01},
        ),
        Step(name="self_norm", kind="norm", function=corrections.self_norm, needs=("mean_weight",)),
    )
}

_CHOICES: dict[str, tuple[str, ...]] = {"statistic": ("k1", "k2", "k3"), "over": ("token", "sum", "mean", "max")}


def chain(spec: Spec, *, options: Mapping[str, Any] | None = None) -> Chain:
    """The rows that ``spec`` names, in its order, with their options; ``options`` go to the one row that has each.

    Raises ConfigError for a name or option that no row has, and for chains that are wrong, with the reason.
    """
    parts: Sequence[str | Mapping[str, Any]] = spec.split("+") if isinstance(spec, str) else spec
    steps = [_step(part) for part in parts]
    _refuse_wrong_chains(steps)
    for key, value in (options or {}).items():
        owners = [index for index, step in enumerate(steps) if key in step.options]
        if len(owners) != 1:
            found = "no row has it" if not owners else f"{' and '.join(steps[i].name for i in owners)} have it"
            raise ConfigError(f"algorithm: correction option {key!r} must belong to one row of {spec!r}; {found}")
        steps[owners[0]] = _with_options(steps[owners[0]], {key: value})
    return tuple(steps)


def weights(steps: Chain, evidence: Evidence) -> torch.Tensor:
    """The product of the chain's factors, 0 where rejected, without gradient.  -> f32[M]"""
    result = corrections.none(evidence.log_ratio)
    for step in steps:
        result = step.apply(result, evidence)
    return result


def norm_level(steps: Chain) -> str | None:
    """Over what self_norm takes the mean of the weights (``diagnostics.mean_weight``); None in a chain without it."""
    if all(step.kind != "norm" for step in steps):
        return None
    return "sequence" if any(step.level == "sequence" for step in steps) else "token"


LEFT_BEHIND = 0.1
"""Ratio of a token that the policy has left behind: it samples it ten times less often than what sampled it."""


def weight_left_behind(steps: Chain) -> float:
    """What a token of ratio ``LEFT_BEHIND`` and negative advantage counts; 1 is as if it were fresh."""
    token = torch.zeros(1, dtype=torch.int64)
    ratio = torch.full((1,), LEFT_BEHIND)
    evidence = Evidence(
        log_ratio=ratio.log(), sequence=token, num_sequences=1, advantages=-torch.ones(1), mean_weight=1.0
    )
    return float(weights(steps, evidence))


def is_uncorrected(steps: Chain) -> bool:
    """Whether stale data would be trained as if it were fresh, whatever the rows are called.

    Judged by effect: tokens that the policy has left behind are what stale training goes on pushing. A weight takes
    them down to about their ratio, and a mask that bounds the ratio rejects them; one that counts them over a half
    (``veto`` at 1e-4, a ``k_stat`` of huge bounds) is none. A negative advantage, for ``opsm`` looks at no other.
    """
    return weight_left_behind(steps) > 0.5


def _step(part: str | Mapping[str, Any]) -> Step:
    table = {"name": part.strip()} if isinstance(part, str) else dict(part)
    name = table.pop("name", None)
    if name not in CORRECTIONS:
        raise ConfigError(f"algorithm: correction must be one of {', '.join(CORRECTIONS)}, got {name!r}")
    return _with_options(CORRECTIONS[name], table)


def _with_options(step: Step, changes: Mapping[str, Any]) -> Step:
    for key, value in changes.items():
        where = f"algorithm: correction {step.name}"
        if key not in step.options:
            raise ConfigError(f"{where} has no option {key!r}; it has {', '.join(step.options) or 'none'}")
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                raise ConfigError(f"{where}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
        elif not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise ConfigError(f"{where}: {key} must be a number, got {value!r}")
    return replace(step, options={**step.options, **changes})


def _refuse_wrong_chains(steps: Sequence[Step]) -> None:
    if not steps:
        raise ConfigError('algorithm: correction is empty; "none" trains without one')
    names = [step.name for step in steps]
    ratios = [step.name for step in steps if step.kind == "weight" and step.name != "none"]
    if len(ratios) > 1:
        raise ConfigError(
            f"algorithm: correction {' + '.join(names)} weights with the ratio twice: {', '.join(ratios)}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"algorithm: correction {' + '.join(names)} names a row twice")
    if "self_norm" in names[:-1]:
        raise ConfigError("algorithm: correction self_norm must come last: what follows it would change the mean again")
