"""Writes a value of the run file as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(value: Any) -> str:
    """Return ``value`` as TOML writes it after ``key =``; tables inline, tuples as lists."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, float):
        return str(value)  # inf and nan as in TOML
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no surrogate pairs as in JSON


def _key(name: str) -> str:
    """Quote a name that TOML cannot write bare; with a dot, for example, it would be several keys."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_text(name)
