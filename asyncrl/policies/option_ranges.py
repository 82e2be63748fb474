"""What the numbers among an algorithm's options may be. Outside, a loss is infinite or nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrl.errors import ConfigError
from asyncrl.policies.catalogue import ADVANTAGES, AGGREGATIONS, LOSSES
from asyncrl.policies.correction_chains import CORRECTIONS


class Part(Protocol):
    """An advantage, a loss, an aggregation or a correction."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> object: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """low <= value <= high, or low < value where ``is_open``; ``why`` is said where it is not plain.

    Infinity turns a bound off, unless ``is_finite``.
    """

    low: float
    high: float = math.inf
    is_open: bool = False
    is_finite: bool = True
    why: str = ""

    def __contains__(self, value: float) -> bool:
        is_above = self.low < value if self.is_open else self.low <= value
        return is_above and value <= self.high and (math.isfinite(value) or not self.is_finite)

    def __str__(self) -> str:
        bounds = [f"{'>' if self.is_open else '>='} {self.low:g}"]
        bounds += [f"<= {self.high:g}"] if self.high < math.inf else ["finite"] if self.is_finite else []
        return " and ".join(bounds) + self.why


_ABOVE_0 = Range(low=0.0, is_open=True)
_FROM_0 = Range(low=0.0)
_SHARE = Range(low=0.0, high=1.0)
_CLIP = Range(low=0.0, is_finite=False)
_FRESH = " (the ratio of a fresh token is 1)"
_CAP = Range(low=1.0, is_finite=False, why=_FRESH)
_ANY = Range(low=-math.inf, is_finite=False)

RANGES: Final[Mapping[str, Range]] = {
    "cap": _CAP,
    "cap_negative": _CAP,
    "cap_positive": _CAP,
    "clip_high": _CLIP,
    "cispo.clip_high": Range(low=0.0, is_open=True, is_finite=False),  # with cap_mode "absolute" the cap itself
    "clip_low": _CLIP,
    "coef": _ABOVE_0,
    "delta": _FROM_0,
    "delta_high": _ABOVE_0,
    "delta_low": _ABOVE_0,
    "dual_clip": _FROM_0,
    "eps": _ABOVE_0,
    "maxrl.eps": _FROM_0,
    "f_norm": _ABOVE_0,
    "gamma": _SHARE,
    "high": _CAP,
    "k_stat.high": _ANY,
    "kl_coef": _FROM_0,
    "lam": _SHARE,
    "low": Range(low=0.0, high=1.0, why=_FRESH),
    "k_stat.low": _ANY,
    "max_drop": _ABOVE_0,
    "max_response_tokens": _ABOVE_0,
    "ratio_cap": _CAP,
    "tau_negative": _ABOVE_0,
    "tau_positive": _ABOVE_0,
    "threshold": _ABOVE_0,
    "veto.threshold": Range(low=0.0, high=1.0, is_open=True, why=_FRESH),
}
"""By option, or by part and option where one departs."""

_OURS: Final = frozenset(
    row.function for table in (ADVANTAGES, LOSSES, AGGREGATIONS, CORRECTIONS) for row in table.values()
)


def refuse_wrong_numbers(parts: Iterable[Part]) -> None:
    """Raises ConfigError for the first option out of its range. Parts of a user's own are theirs to check."""
    for part in parts:
        if part.function not in _OURS:
            continue
        for option, value in part.options.items():
            allowed = RANGES.get(f"{part.name}.{option}", RANGES.get(option))
            if allowed is not None and value not in allowed:
                raise ConfigError(f"algorithm.options: {option} of {part.name} must be {allowed}, got {value:g}")
        low, high = part.options.get("low", 0.0), part.options.get("high", 1.0)
        if not low < high:
            raise ConfigError(f"algorithm.options: low of {part.name} must be < its high, got {low:g} and {high:g}")
