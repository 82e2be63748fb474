"""What sections of a run file check of themselves. Errors name the key; who builds the section names the section."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.errors import ConfigError


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
        raise ConfigError(f"{name}: {pattern!r} is no regular expression: {error}") from None
