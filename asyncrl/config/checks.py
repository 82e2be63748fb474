"""Helpers with which the sections of a run file check themselves.

Errors name the key; the caller that builds the section adds its name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

from asyncrl.config.secret_values import hide_credentials
from asyncrl.errors import ConfigError

MOST_WORKERS: Final = 65_536
"""Default connection limit of a nats-server. Each worker uses at least one connection."""
MOST_THREADS: Final = 4096
"""Per process; no machine has that many CPUs."""
MOST_KEPT: Final = 1024
"""Most tokens that top_p or top_k leave to sample from in training, because each travels with the answer. A nucleus
that would be larger is cut to the likeliest."""
MOST_STOPS: Final = 32
"""Limit of SGLang for the stop texts of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a key allows: low <= value <= high, or low < value where ``is_open``.

    Infinity is allowed unless ``is_finite``; it turns a bound off. Error messages append ``why``.
    """

    low: float
    high: float = math.inf
    is_open: bool = False
    is_finite: bool = False
    why: str = ""

    def __contains__(self, value: float) -> bool:
        is_above = self.low < value if self.is_open else self.low <= value
        return is_above and value <= self.high and (math.isfinite(value) or not self.is_finite)

    def __str__(self) -> str:
        low, high = (f"{one:,}" if isinstance(one, int) else f"{one:g}" for one in (self.low, self.high))
        bounds = [f"{'>' if self.is_open else '>='} {low}"]
        bounds += [f"<= {high}"] if self.high < math.inf else ["finite"] if self.is_finite else []
        return " and ".join(bounds) + self.why


_OFF: Final = " (0 is off)"
N = TypeVar("N", int, float)
Positive = Annotated[N, Range(low=0, is_open=True)]
NonNegative = Annotated[N, Range(low=0)]
OrOff = Annotated[N, Range(low=0, why=_OFF)]
OrNoLimit = Annotated[N, Range(low=0, why=" (0 is no limit)")]
ShareOrOff = Annotated[float, Range(low=0, high=1, why=_OFF)]
PositiveShare = Annotated[float, Range(low=0, high=1, is_open=True)]
NumKept = Annotated[int, Range(low=0, high=MOST_KEPT)]
"""Ranges of keys, which tables.py checks."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def require_http(url: str) -> None:
    """Raise ConfigError unless the key ``url`` is the address of a server."""
    shown = hide_credentials(url)
    require(url.startswith(("http://", "https://")), f"url must start with http:// or https://, got {shown!r}")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port over 65535, or an unfinished IPv6 address
        is_whole = False
    require(is_whole, f"url must be http://HOST:PORT, got {shown!r}")


def compile_pattern(pattern: str, name: str) -> re.Pattern[str]:
    """Compile the regular expression in the key ``name``. Raises ConfigError."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
