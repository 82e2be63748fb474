"""Reads the keys in a role's credentials file. bin/nats-config writes USER:PASSWORD, then one key per line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError

_NAMES: Final = ("signing-key", "learner-key")
KEY_LINE: Final = re.compile(f"({'|'.join(_NAMES)}): ([0-9a-f]{{64}})")
"""A line after USER:PASSWORD: the learner's secret key, or its public key for other roles (messages/signing.py)."""


def keys(path: str, *, role: str) -> dict[str, str]:
    """Return the keys in a credentials file by name; empty if the file cannot be read.

    Raises ConfigError for a damaged key. It must not count as none: a process without the learner's key trusts the
    first learner that it hears.
    """
    file = Path(path.replace("{role}", role))
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # connecting with this file reports the error
    for number, line in enumerate(lines[1:], 2):  # the first is USER:PASSWORD
        name = next((one for one in _NAMES if line.lower().startswith(one)), "")
        if name and not KEY_LINE.fullmatch(line):
            raise ConfigError(
                f"{file}, line {number}: must be {name}: and 64 hexadecimal digits in lower case; put the file back "
                "from a copy, or give the run a new key with bin/nats-config --rotate-keys"
            )
    return {found[1]: found[2] for line in lines if (found := KEY_LINE.fullmatch(line))}
