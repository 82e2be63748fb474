"""The keys in a role's credentials file, as bin/nats-config writes it: USER:PASSWORD, then a line for each key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

KEY_LINE: Final = re.compile("(signing-key|learner-key): ([0-9a-f]{64})")
"""After USER:PASSWORD: the learner's secret half, or for other roles its public one (messages/signing.py)."""


def keys(path: str, *, role: str) -> dict[str, str]:
    """The lines of a credentials file that are keys, by their names; none if it cannot be read."""
    try:
        lines = Path(path.replace("{role}", role)).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # whoever connects with it says so
    return {found[1]: found[2] for line in lines if (found := KEY_LINE.fullmatch(line))}
