"""A value of the run file as TOML text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(value: Any) -> str:
    """``value`` as it is written behind ``key =``; tables inline, tuples as lists."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, float):
        return str(value)  # inf and nan as TOML spells them
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's surrogate pairs are no TOML


def _key(name: str) -> str:
    """A name with a dot in it is one key only in quotes."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_text(name)
