"""Reads the keys in a role's credentials file. bin/nats-config writes USER:PASSWORD, then one key per line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

KEY_LINE: Final = re.compile("(signing-key|learner-key): ([0-9a-f]{64})")
"""A line after USER:PASSWORD: the learner's secret key, or its public key for other roles (messages/signing.py)."""


def keys(path: str, *, role: str) -> dict[str, str]:
    """Return the keys in a credentials file by name; empty if the file cannot be read."""
    try:
        lines = Path(path.replace("{role}", role)).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # connecting with this file reports the error
    return {found[1]: found[2] for line in lines if (found := KEY_LINE.fullmatch(line))}
