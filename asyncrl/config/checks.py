"""Helpers with which the sections of a run file check themselves.

Errors name the key; the caller that builds the section adds its name.
"""

from __future__ import annotations

import re
from typing import Any, Final
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


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def positive(section: Any, *names: str) -> None:
    for name in names:
        require(getattr(section, name) > 0, f"{name} must be > 0, got {getattr(section, name)}")


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
