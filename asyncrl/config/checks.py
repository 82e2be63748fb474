"""What sections of a run file check of themselves. Errors name the key; who builds the section names the section."""

from __future__ import annotations

import re
from typing import Any, Final

from asyncrl.errors import ConfigError

MOST_WORKERS: Final = 65_536
"""Connections that a nats-server takes, unless it is told another number; a worker has one at least."""
MOST_THREADS: Final = 4096
"""Of one process: no machine has as many CPUs."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def positive(section: Any, *names: str) -> None:
    for name in names:
        require(getattr(section, name) > 0, f"{name} must be > 0, got {getattr(section, name)}")


def compiled(pattern: str, name: str) -> re.Pattern[str]:
    """A regular expression that the key ``name`` holds."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
